"""A ring buffer with room for a fixed number of decoded rows, in which new pieces overwrite the oldest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from paragrad.core.state import Allocate
from paragrad.data.plan import Rows
from paragrad.data.source import leaves, mapped


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece in the ring."""

    piece: int
    offset: int
    rows: int
    stamp: int
    due: int
    """The time until which the piece is needed, in a unit that the writer chooses."""


class Arena:
    """One tensor of ``capacity`` rows per leaf. One process writes; other processes that share the memory read meanwhile.

    ``where[piece]`` encodes the first row of a piece and a stamp of when it was written in one number. A reader compares it
    before and after it copies rows, and so knows that nothing overwrote them.
    """

    def __init__(self, like: Any, *, pieces: int, capacity: int, allocate: Allocate, life: int = 0) -> None:
        self.capacity = capacity
        self.where: Rows = allocate("where", pieces, torch.int64).numpy()
        self._leaves = [
            allocate(f"leaf{k}", capacity * row[0].numel(), row.dtype).view(capacity, *row.shape[1:])
            for k, row in enumerate(leaves(like))
        ]
        self._tree = nested(like, iter(self._leaves))
        self._placed: deque[Placed] = deque()
        self._head = 0
        # A writer that replaces another must not use the same stamps.
        self._stamp = life << 32

    def clear(self) -> None:
        """Remove all pieces: a predecessor may have left one half written."""
        self.where[:] = 0
        self._placed.clear()
        self._head = 0

    def victims(self, rows: int) -> list[Placed]:
        """Return the pieces that the next ``rows`` rows will overwrite, the oldest first."""
        assert rows <= self.capacity
        start = self._start(rows)
        placed = list(self._placed)
        hit = [k for k, one in enumerate(placed) if one.offset < start + rows and start < one.offset + one.rows]
        return placed[: max(hit, default=-1) + 1]

    def put(self, piece: int, tree: Any, *, due: int = 0) -> None:
        """Write a piece over the oldest ones."""
        new = leaves(tree)
        rows = len(new[0])
        for gone in self.victims(rows):
            self._placed.popleft()
            if self.where[gone.piece] // self.capacity == gone.stamp:
                self.where[gone.piece] = 0
        start = self._start(rows)
        for room, leaf in zip(self._leaves, new, strict=True):
            room[start : start + rows].copy_(leaf)
        self._stamp += 1
        self._placed.append(Placed(piece, start, rows, self._stamp, due))
        self._head = start + rows
        self.where[piece] = self._stamp * self.capacity + start

    def take(self, piece: int, rows: int) -> Any | None:
        """Return a copy of a piece, or None if it is not in the ring."""
        found = int(self.where[piece])
        if not found:
            return None
        start = found % self.capacity
        return mapped(self._tree, lambda leaf: leaf[start : start + rows].clone())

    def gather(self, pieces: Rows, inside: Rows) -> Any | None:
        """Return rows by piece and by number within the piece, or None if one of the pieces is not in the ring."""
        while True:
            before = self.where[pieces]
            if not before.all():
                return None
            batch = picked(self._tree, before % self.capacity + inside)
            if (self.where[pieces] == before).all():
                return batch

    def _start(self, rows: int) -> int:
        return self._head if self._head + rows <= self.capacity else 0


def picked(tree: Any, rows: Rows) -> Any:
    """Return these rows of every leaf."""
    index = torch.from_numpy(rows)
    return mapped(tree, lambda leaf: leaf.index_select(0, index))


def nested(like: Any, values: Iterator[torch.Tensor]) -> Any:
    """Return these leaves in the nesting of ``like``."""
    return mapped(like, lambda _: next(values))


def private(name: str, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory of this process alone. The system provides only the pages that are written."""
    return torch.zeros(length, dtype=dtype) if name == "where" else torch.empty(length, dtype=dtype)
