"""A module's parameters as views of one contiguous vector, so that a pull is one copy and a commit one subtraction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from paragrad.errors import UsageError
from paragrad.types import Vector

HOST = torch.device("cpu")
"""Device of all vectors, except those of replicas that are computed together on another device."""


@dataclass(frozen=True)
class Piece:
    """One tensor and its range in the vector."""

    name: str
    tensor: torch.Tensor
    lo: int
    hi: int
    dtype: torch.dtype
    """Type of its segment; the tensor has another one only if it was moved out."""


class Flat:
    """The distinct tensors of a module, grouped by dtype, each a view of its group's segment.

    ``vector`` is float32, or float64 if the module has any. If all tensors are of that type and on the device ``home`` (by
    default the CPU), the vector *is* the segment. Otherwise it is on the CPU, and ``spread`` and ``collect`` copy and cast.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, kind: str = "parameter", home: torch.device | None = None
    ) -> None:
        distinct: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            distinct.setdefault(id(tensor), (name, tensor))
        self.kind = kind
        self.pieces: list[Piece] = []
        offset = 0
        for name, tensor in sorted(distinct.values(), key=lambda item: str(item[1].dtype)):
            self.pieces.append(Piece(name, tensor, offset, offset + tensor.numel(), tensor.dtype))
            offset += tensor.numel()
        dtypes = {piece.dtype for piece in self.pieces}
        devices = {piece.tensor.device for piece in self.pieces}
        self.dtype = _master(dtypes)
        self._segments: dict[torch.dtype, tuple[int, Vector]] = {}
        """The segment of each type, and the offset in the vector where it begins."""
        for dtype in dtypes:
            mine = [piece for piece in self.pieces if piece.dtype == dtype]
            lo, hi, device = mine[0].lo, mine[-1].hi, mine[0].tensor.device
            self._segments[dtype] = lo, torch.empty(hi - lo, dtype=dtype, device=device)
        self.coarse = dtypes not in (set(), {self.dtype})
        """True if some tensors are of another type than the vector."""
        segment = self.segment
        self._mirrored = self.coarse or (segment is not None and devices != {home or HOST})
        self.vector: Vector = torch.empty(offset, dtype=self.dtype) if self._mirrored or segment is None else segment
        self.reclaim()
        self.collect()

    @property
    def segment(self) -> Vector | None:
        """The one vector that the tensors are views of, on their own device; None if they are of several types."""
        return None if self.coarse or not self._segments else self._segments[self.dtype][1]

    @property
    def movable(self) -> bool:
        """True if another vector can replace this one: all tensors are of its type."""
        return not self.coarse

    def move_to(self, vector: Vector) -> None:
        """Replace the vector by another one of the same length, with its values.

        Tensors on the CPU become views of it. Tensors on a device keep their memory, and are copied and cast as before.
        """
        if self.coarse:
            raise UsageError("A module of several dtypes, or of one below float32, cannot share the center's memory.")
        if vector.numel() != self.vector.numel() or vector.dtype != self.dtype or not vector.is_contiguous():
            raise UsageError(
                f"The tensors have {self.vector.numel():,} values of {self.dtype}, but the new vector has "
                f"{vector.numel():,} of {vector.dtype}. Give a contiguous vector of the same length and type."
            )
        self.vector = vector
        if self._mirrored:
            return
        self._segments = {self.dtype: (0, vector)}
        for piece in self.pieces:
            piece.tensor.data = vector[piece.lo : piece.hi].view(piece.tensor.shape)

    def spread(self) -> bool:
        """Copy the vector into the tensors. Return True if some of them are of another type than the vector."""
        if self._mirrored:
            for lo, segment in self._segments.values():
                segment.copy_(self.vector[lo : lo + segment.numel()])
            if self.coarse:
                self.collect()
        return self.coarse

    def collect(self) -> None:
        """Copy the tensors into the vector."""
        if self._mirrored:
            for lo, segment in self._segments.values():
                self.vector[lo : lo + segment.numel()].copy_(segment)

    def reclaim(self) -> None:
        """Make tensors that have other memory, as after ``tensor.data = ...``, views of their segment, with their values."""
        for piece in self.pieces:
            tensor = piece.tensor
            if tensor.dtype == piece.dtype and tensor.numel() and tensor.data_ptr() != self._address(piece):
                lo, segment = self._segments[piece.dtype]
                view = segment[piece.lo - lo : piece.hi - lo].view(tensor.shape)
                view.copy_(tensor.detach())
                tensor.data = view

    def _address(self, piece: Piece) -> int:
        lo, segment = self._segments[piece.dtype]
        return segment.data_ptr() + (piece.lo - lo) * segment.element_size()

    def views(self, vector: Vector) -> list[torch.Tensor]:
        """Return views of any vector of this length, shaped like the tensors."""
        return [vector[piece.lo : piece.hi].view(piece.tensor.shape) for piece in self.pieces]

    def check(self, named: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """Raise if a tensor is no longer a view of its segment, or is no longer the tensor of that name in ``named``."""
        now = None if named is None else dict(named)
        for piece in self.pieces:
            tensor = piece.tensor
            replaced = now is not None and now.get(piece.name) is not tensor
            moved = tensor.data_ptr() != self._address(piece) or tensor.dtype != piece.dtype or not tensor.is_contiguous()
            if replaced or (tensor.numel() and moved):
                raise UsageError(
                    f"The {self.kind} {piece.name!r} was moved out of the model's flat vector, so its training would be lost. "
                    "The cause is a call such as .double(), .to(memory_format=...), load_state_dict(assign=True) or "
                    "flatten_parameters(): make it before training, on the model that you give to pg.train."
                )


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are trained. Raise if a flat vector cannot hold one of them."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            raise UsageError(f"Parameter {name!r} has no shape yet: run one batch through the lazy module before training.")
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) and isinstance(child, nn.Embedding | nn.EmbeddingBag):
            raise UsageError(
                f"{type(child).__name__} {name!r} has sparse=True, but a flat vector holds dense gradients only: "
                "use sparse=False."
            )
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    for name, parameter in named:
        if parameter.is_meta:
            raise UsageError(
                f"Parameter {name!r} has no values (device 'meta'): call module.to_empty(device='cpu') and fill it."
            )
    places: dict[int, str] = {}
    for name, parameter in named:
        if parameter.numel() and places.setdefault(parameter.data_ptr(), name) != name:
            raise UsageError(
                f"Parameters {places[parameter.data_ptr()]!r} and {name!r} are two objects that share memory. "
                "Training would separate them: tie them by assigning one Parameter to both modules."
            )
    for name, parameter in named:
        if not parameter.is_floating_point():
            raise UsageError(f"Parameter {name!r} is {parameter.dtype}, but only real floating parameters can be trained.")
    if not named:
        raise UsageError("The model has no parameter that requires a gradient: there is nothing to train.")
    return named


def plain_name(name: str) -> str:
    """Return the name of a tensor without the prefixes that ``torch.compile`` adds."""
    return name.replace("_orig_mod.", "")


def plain_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's tensors by their plain names."""
    return {plain_name(name): tensor for name, tensor in module.state_dict().items()}


def load_plain(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load tensors by their plain names; the module's other tensors stay as they are."""
    mine = {name: tensors[plain_name(name)] for name in module.state_dict() if plain_name(name) in tensors}
    module.load_state_dict(mine, strict=False)


def floating_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers that the center averages, such as batch-norm statistics."""
    return [(n, b) for n, b in _kept(module) if b.is_floating_point()]


def integer_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers that the center takes from the last commit, such as counters."""
    return [(n, b) for n, b in _kept(module) if not b.is_floating_point() and not b.is_complex()]


def _kept(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers; each process makes the others (masks, tables) anew."""
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _master(dtypes: set[torch.dtype]) -> torch.dtype:
    if dtypes and not any(dtype.is_floating_point for dtype in dtypes):
        return torch.int64
    return torch.float64 if torch.float64 in dtypes else torch.float32
