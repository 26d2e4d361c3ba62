"""The base class of codecs, which encode the vector of a commit in fewer bytes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from paragrad.core import kernels
from paragrad.errors import UsageError
from paragrad.types import Vector

CACHED = 65_536
"""Elements that are processed at a time on a CPU, so that they stay in its cache."""


@dataclass(frozen=True)
class Piece:
    """Type and length of one named tensor of a coded vector."""

    dtype: torch.dtype
    length: int
    exact: bool = True
    """False: ``length`` is an upper limit."""


@dataclass(frozen=True)
class Codec(ABC):
    """Encodes a vector as a few named tensors, and decodes it.

    A subclass defines ``layout``, ``pack`` and ``unpack``; for a sharded center also ``unit`` and ``cut``. ``Feedback`` adds
    the part that a codec leaves out to the next commit. A codec is deterministic: the same vector has the same bytes on every
    engine, so that a replay repeats them. A vector that is not finite must decode to one that is not finite, so that the
    center rejects it as it does without a codec.
    """

    @property
    def name(self) -> str:
        """Name on the command line."""
        return type(self).__name__.lower()

    @abstractmethod
    def layout(self, length: int) -> dict[str, Piece]:
        """Return the tensors of a coded vector of this length."""

    @abstractmethod
    def pack(self, vector: Vector) -> dict[str, torch.Tensor]:
        """Return the tensors that ``layout`` names; a vector that is not finite is passed as all NaN."""

    @abstractmethod
    def unpack(self, coded: Mapping[str, torch.Tensor], out: Vector) -> None:
        """Decode into all of ``out``; names, types and lengths have been checked."""

    @property
    def unit(self) -> int:
        """A coded vector can be cut at multiples of this many elements; 0: nowhere."""
        return 0

    def cut(self, coded: Mapping[str, torch.Tensor], lo: int, hi: int) -> dict[str, torch.Tensor]:
        """Return the coded elements from ``lo`` to ``hi``, which ``of_slices`` decodes."""
        raise NotImplementedError

    @property
    def of_slices(self) -> Codec:
        """Codec that decodes a slice."""
        return self

    def encode(self, vector: Vector) -> dict[str, torch.Tensor]:
        """Return the vector as named tensors in main memory, as they are sent."""
        if not kernels.finite(vector):
            vector = torch.full_like(vector, math.nan)
        return {name: tensor.cpu() for name, tensor in self.pack(vector).items()}

    def decode(self, coded: Mapping[str, torch.Tensor], out: Vector) -> Vector:
        """Decode into ``out``; raise if the tensors cannot be a coded vector of its length."""
        layout = self.layout(out.numel())
        if set(coded) != set(layout):
            raise self.malformed(f"it has {sorted(coded)} instead of {sorted(layout)}")
        for name, piece in layout.items():
            tensor = coded[name]
            if tensor.dtype != piece.dtype or tensor.ndim != 1:
                raise self.malformed(
                    f"{name} is of type {tensor.dtype} in {tensor.ndim} dimensions instead of {piece.dtype} in 1"
                )
            if tensor.numel() > piece.length or (piece.exact and tensor.numel() != piece.length):
                fitting = f"{piece.length:,}" if piece.exact else f"at most {piece.length:,}"
                raise self.malformed(f"{name} has {tensor.numel():,} elements instead of {fitting}")
        self.unpack({name: tensor.to(out.device) for name, tensor in coded.items()}, out)
        return out

    def limit(self, length: int) -> int:
        """Return the largest size in bytes of a coded vector of this length."""
        return sum(piece.length * piece.dtype.itemsize for piece in self.layout(length).values())

    def malformed(self, how: str) -> UsageError:
        """Return the error for tensors that are not a coded vector."""
        return UsageError(
            f"A commit coded by {self.name} is malformed: {how}. Worker and center must have the same codec and model."
        )


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Base class of codecs that send a few numbers per block of elements."""

    block: int = 2048
    """Elements per block."""

    def __post_init__(self) -> None:
        if self.block < 1:
            raise UsageError(f"block={self.block}, but a block must have at least 1 element.")

    @property
    def unit(self) -> int:
        return self.block

    def count(self, length: int) -> int:
        """Return the number of blocks of a vector; the last one may be shorter."""
        return -(-length // self.block)

    def blocks(self, vector: Vector) -> Iterator[tuple[slice, slice]]:
        """Yield slices of elements with their slices of blocks, many blocks at a time; a shorter last block comes alone."""
        whole = vector.numel() // self.block * self.block
        for here in pieces(vector[:whole], self.block):
            yield here, slice(here.start // self.block, here.stop // self.block)
        if whole != vector.numel():
            yield slice(whole, vector.numel()), slice(whole // self.block, whole // self.block + 1)

    def blocks_of(self, lo: int, hi: int) -> slice:
        """Return the blocks of the elements from ``lo`` to ``hi``."""
        return slice(lo // self.block, self.count(hi))


def size(coded: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of a coded vector."""
    return sum(tensor.numel() * tensor.element_size() for tensor in coded.values())


def pieces(vector: Vector, unit: int = 1) -> Iterator[slice]:
    """Yield the slices in which a vector is processed, so that intermediate results stay in the cache of a core."""
    step = max(1, CACHED // unit) * unit if vector.device.type == "cpu" else vector.numel()
    for start in range(0, vector.numel(), max(1, step)):
        yield slice(start, min(start + step, vector.numel()))
