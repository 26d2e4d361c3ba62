"""What a codec is: how the vector of a commit looks on the wire, in fewer bytes than it has."""

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
"""Elements that are worked on at a time."""


@dataclass(frozen=True)
class Piece:
    """One named tensor of a coded vector: its type, and how many elements it has."""

    dtype: torch.dtype
    length: int
    exact: bool = True
    """False: it has at most so many."""


@dataclass(frozen=True)
class Codec(ABC):
    """A vector as a few named tensors and back; subclass it and write ``layout``, ``pack`` and ``unpack``; for a center that
    is spread over shards, ``unit`` and ``cut`` too.

    What is lost is not forgotten: ``Feedback`` adds it to the next commit. There is no chance in it: the same vector has the
    same bytes on every engine, so that a replay repeats them. A vector that is not finite decodes to one that is not, so
    that the center refuses it as it would without a codec.
    """

    @property
    def name(self) -> str:
        """The codec's name on the command line."""
        return type(self).__name__.lower()

    @abstractmethod
    def layout(self, length: int) -> dict[str, Piece]:
        """The tensors that a vector of that length becomes."""

    @abstractmethod
    def pack(self, vector: Vector) -> dict[str, torch.Tensor]:
        """The tensors that ``layout`` names; of a vector that is all NaN where it is not finite."""

    @abstractmethod
    def unpack(self, coded: Mapping[str, torch.Tensor], out: Vector) -> None:
        """The inverse: fill ``out`` entirely. Names, types and lengths have been checked."""

    @property
    def unit(self) -> int:
        """Where a coded vector can be cut: at multiples of so many elements; 0: nowhere."""
        return 0

    def cut(self, coded: Mapping[str, torch.Tensor], lo: int, hi: int) -> dict[str, torch.Tensor]:
        """What was coded of the elements from ``lo`` to ``hi``, as ``of_slices`` decodes it."""
        raise NotImplementedError

    @property
    def of_slices(self) -> Codec:
        """What decodes a slice."""
        return self

    def encode(self, vector: Vector) -> dict[str, torch.Tensor]:
        """The vector as named tensors in main memory: exactly what goes over a wire."""
        if not kernels.finite(vector):
            vector = torch.full_like(vector, math.nan)
        return {name: tensor.cpu() for name, tensor in self.pack(vector).items()}

    def decode(self, coded: Mapping[str, torch.Tensor], out: Vector) -> Vector:
        """Fill ``out`` with what was encoded; raises where that cannot have been a vector of its length."""
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
        """The most bytes that a vector of that length becomes."""
        return sum(piece.length * piece.dtype.itemsize for piece in self.layout(length).values())

    def malformed(self, how: str) -> UsageError:
        """The error for tensors that no vector becomes."""
        return UsageError(
            f"A commit coded by {self.name} is malformed: {how}. Worker and center must have the same codec and model."
        )


def size(coded: Mapping[str, torch.Tensor]) -> int:
    """Bytes of a coded vector."""
    return sum(tensor.numel() * tensor.element_size() for tensor in coded.values())


def pieces(vector: Vector, unit: int = 1) -> Iterator[slice]:
    """From where to where a vector is worked on at a time: so that what is made of a piece stays in a core's cache."""
    step = max(1, CACHED // unit) * unit if vector.device.type == "cpu" else vector.numel()
    for start in range(0, vector.numel(), max(1, step)):
        yield slice(start, min(start + step, vector.numel()))


def blocks(vector: Vector, block: int) -> Iterator[tuple[slice, slice]]:
    """The blocks of a vector, many at a time, the shorter one at its end for itself: which elements, and which blocks."""
    whole = vector.numel() // block * block
    for here in pieces(vector[:whole], block):
        yield here, slice(here.start // block, here.stop // block)
    if whole != vector.numel():
        yield slice(whole, vector.numel()), slice(whole // block, whole // block + 1)


def check_block(block: int) -> None:
    """Raise where blocks cannot be of that size."""
    if block < 1:
        raise UsageError(f"block={block}, but a block has at least 1 element.")
