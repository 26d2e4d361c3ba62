"""A module's parameters as views of one contiguous vector, so that a pull is one copy and a commit one subtraction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from paragrad.errors import UsageError
from paragrad.types import Vector

HOST = torch.device("cpu")
"""Where vectors lie, but for those of replicas that are computed together on a device."""


@dataclass(frozen=True)
class Piece:
    """Where one tensor lies in the vector."""

    name: str
    tensor: torch.Tensor
    lo: int
    hi: int


class Flat:
    """The distinct tensors of a module, grouped by dtype, each a view of its group's segment.

    ``vector`` is float32 (float64 where the module has any). Where the module is of that one type and lies at
    ``home`` (by default the CPU), the vector *is* the segment; else it is on the CPU, and ``spread`` and ``collect`` cast at
    the border.
    """

    def __init__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, kind: str = "parameter", home: torch.device | None = None
    ) -> None:
        named = sorted(_distinct(tensors), key=lambda item: str(item[1].dtype))
        self.kind = kind
        self.pieces: list[Piece] = []
        offset = 0
        for name, tensor in named:
            self.pieces.append(Piece(name, tensor, offset, offset + tensor.numel()))
            offset += tensor.numel()
        dtypes = {tensor.dtype for _, tensor in named}
        devices = {tensor.device for _, tensor in named}
        self.dtype = _master(dtypes)
        self._segments: list[tuple[int, int, Vector]] = []
        for dtype in sorted(dtypes, key=str):
            mine = [piece for piece in self.pieces if piece.tensor.dtype == dtype]
            device = mine[0].tensor.device
            segment = torch.empty(mine[-1].hi - mine[0].lo, dtype=dtype, device=device)
            self._segments.append((mine[0].lo, mine[-1].hi, segment))
        self.coarse = dtypes not in (set(), {self.dtype})
        direct = not self.coarse and devices in (set(), {home or HOST})
        if direct:
            self.vector: Vector = self._segments[0][2] if self._segments else torch.empty(0, dtype=self.dtype)
        else:
            self.vector = torch.empty(offset, dtype=self.dtype)
        self._mirrored = not direct
        self._fill()

    @property
    def segment(self) -> Vector | None:
        """The one vector that the tensors are views of, on their own device; None where they are of several types."""
        return None if self.coarse or not self._segments else self._segments[0][2]

    def _fill(self) -> None:
        for lo, hi, segment in self._segments:
            for piece in self.pieces:
                if lo <= piece.lo and piece.hi <= hi and piece.tensor.dtype == segment.dtype:
                    view = segment[piece.lo - lo : piece.hi - lo].view(piece.tensor.shape)
                    view.copy_(piece.tensor.detach())
                    piece.tensor.data = view
        self.collect()

    @property
    def movable(self) -> bool:
        """Whether another vector can take this one's place: not where the tensors are coarser than it."""
        return not self.coarse

    def move_to(self, vector: Vector) -> None:
        """Let another vector of the same length take the place of this one; its contents count.

        Tensors on the CPU become views of it; those on a device keep their own memory, and are cast at the border as before.
        """
        if self.coarse:
            raise UsageError("A module of several dtypes, or of a coarse one, cannot share the center's memory.")
        if vector.numel() != self.vector.numel() or vector.dtype != self.dtype or not vector.is_contiguous():
            raise UsageError(
                f"The tensors fill {self.vector.numel():,} values of {self.dtype}, but were to move to {vector.numel():,} of "
                f"{vector.dtype}. Give a contiguous vector of the same length and type."
            )
        self.vector = vector
        if self._mirrored:
            return
        self._segments = [(0, vector.numel(), vector)]
        for piece in self.pieces:
            piece.tensor.data = vector[piece.lo : piece.hi].view(piece.tensor.shape)

    def spread(self) -> bool:
        """vector -> tensors. True where the tensors are coarser than the vector."""
        if self._mirrored:
            for lo, hi, segment in self._segments:
                segment.copy_(self.vector[lo:hi])
            if self.coarse:
                self.collect()
        return self.coarse

    def collect(self) -> None:
        """tensors -> vector."""
        if self._mirrored:
            for lo, hi, segment in self._segments:
                self.vector[lo:hi].copy_(segment)

    def reclaim(self) -> None:
        """Bring back tensors whose memory was exchanged for another, as by ``tensor.data = ...``, with their values."""
        for lo, hi, segment in self._segments:
            for piece in self.pieces:
                inside = lo <= piece.lo and piece.hi <= hi and piece.tensor.dtype == segment.dtype
                place = segment.data_ptr() + (piece.lo - lo) * segment.element_size()
                if inside and piece.tensor.numel() and piece.tensor.data_ptr() != place:
                    view = segment[piece.lo - lo : piece.hi - lo].view(piece.tensor.shape)
                    view.copy_(piece.tensor.detach())
                    piece.tensor.data = view

    def views(self, vector: Vector) -> list[torch.Tensor]:
        """Any vector of this length, cut and shaped as the tensors are."""
        return [vector[piece.lo : piece.hi].view(piece.tensor.shape) for piece in self.pieces]

    def check(self, named: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        """Raise where a tensor no longer lies in its place, or is not the one of that name in ``named`` any more."""
        now = None if named is None else dict(named)
        for piece in self.pieces:
            lo, segment = next((lo, s) for lo, hi, s in self._segments if lo <= piece.lo and piece.hi <= hi)
            expected = segment.data_ptr() + (piece.lo - lo) * segment.element_size()
            tensor = piece.tensor
            replaced = now is not None and now.get(piece.name) is not tensor
            moved = tensor.data_ptr() != expected or tensor.dtype != segment.dtype or not tensor.is_contiguous()
            if replaced or (tensor.numel() and moved):
                raise UsageError(
                    f"The {self.kind} {piece.name!r} was moved out of the model's flat vector, so training would be lost. "
                    "Calls such as .double(), .to(memory_format=...), load_state_dict(assign=True) or flatten_parameters() "
                    "do that: make them before training, on the model that is given to pg.train."
                )


def refuse_lazy(module: nn.Module) -> None:
    """Raise where the shapes of a module depend on a first batch that it has not seen."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            raise UsageError(f"Parameter {name!r} has no shape yet: run one batch through the lazy module before training.")


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that training moves; raise for those that no vector can hold."""
    refuse_lazy(module)
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
                f"Parameters {places[parameter.data_ptr()]!r} and {name!r} are two objects that share memory, and would be "
                "torn apart. Tie them by assigning the one Parameter to both modules."
            )
    for name, parameter in named:
        if not parameter.is_floating_point():
            raise UsageError(f"Parameter {name!r} is {parameter.dtype}, but only real floating parameters can be trained.")
    if not named:
        raise UsageError("The model has no parameter that requires a gradient: there is nothing to train.")
    return named


def plain_name(name: str) -> str:
    """The name of a tensor without what ``torch.compile`` puts into it."""
    return name.replace("_orig_mod.", "")


def plain_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's tensors under such names."""
    return {plain_name(name): tensor for name, tensor in module.state_dict().items()}


def load_plain(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """The inverse of ``plain_state``; tensors that are not given stay as they are."""
    mine = {name: tensors[plain_name(name)] for name in module.state_dict() if plain_name(name) in tensors}
    module.load_state_dict(mine, strict=False)


def floating_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """State that is averaged: batch-norm statistics."""
    return [(n, b) for n, b in _kept(module) if b.is_floating_point()]


def integer_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """State that follows the last commit: counters."""
    return [(n, b) for n, b in _kept(module) if not b.is_floating_point() and not b.is_complex()]


def _kept(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that are part of the model's state; those with ``persistent=False`` (masks, tables) are made anew."""
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _distinct(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        seen.setdefault(id(tensor), (name, tensor))
    return list(seen.values())


def _master(dtypes: set[torch.dtype]) -> torch.dtype:
    if dtypes and not any(dtype.is_floating_point for dtype in dtypes):
        return torch.int64
    return torch.float64 if torch.float64 in dtypes else torch.float32
