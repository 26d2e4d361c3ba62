"""Room for a fixed number of decoded rows: a ring of pieces in which the oldest make way for new ones."""

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
    """Until when it is needed, by whatever the writer counts."""


class Arena:
    """One tensor of ``capacity`` rows for each leaf. One process writes; any that has the memory may read beside it.

    ``where[piece]`` says at which row a piece begins, and when it was put there, in one number: whoever copies rows out
    looks at it before and after, and knows that nothing was written over them in between.
    """

    def __init__(self, like: Any, *, pieces: int, capacity: int, allocate: Allocate, life: int = 0) -> None:
        self.capacity = capacity
        self.where: Rows = allocate("where", pieces, torch.int64).numpy()
        rows = leaves(like)
        self._leaves = [
            allocate(f"leaf{k}", capacity * row[0].numel(), row.dtype).view(capacity, *row.shape[1:])
            for k, row in enumerate(rows)
        ]
        self._tree = nested(like, iter(self._leaves))
        self._placed: deque[Placed] = deque()
        self._head = 0
        self._stamp = life << 32
        """Stamps of a writer's replacement must not be those of its predecessor."""

    def clear(self) -> None:
        """Nothing is here: what a predecessor has left may be half written."""
        self.where[:] = 0
        self._placed.clear()
        self._head = 0

    def victims(self, rows: int) -> list[Placed]:
        """Who must go, the oldest first, for so many rows to find room."""
        assert rows <= self.capacity
        start = self._start(rows)
        last = -1
        for index, placed in enumerate(self._placed):
            if placed.offset < start + rows and start < placed.offset + placed.rows:
                last = index
        return [self._placed[index] for index in range(last + 1)]

    def put(self, piece: int, tree: Any, *, due: int = 0) -> None:
        """Lay a piece out; the oldest make way."""
        own = leaves(tree)
        rows = len(own[0])
        for gone in self.victims(rows):
            self._placed.popleft()
            if self.where[gone.piece] // self.capacity == gone.stamp:
                self.where[gone.piece] = 0
        start = self._start(rows)
        for room, leaf in zip(self._leaves, own, strict=True):
            room[start : start + rows].copy_(leaf)
        self._stamp += 1
        self._placed.append(Placed(piece, start, rows, self._stamp, due))
        self._head = start + rows
        self.where[piece] = self._stamp * self.capacity + start

    def take(self, piece: int, rows: int) -> Any | None:
        """A copy of a piece that is here."""
        found = int(self.where[piece])
        if not found:
            return None
        start = found % self.capacity
        return mapped(self._tree, lambda leaf: leaf[start : start + rows].clone())

    def gather(self, pieces: Rows, inside: Rows) -> Any | None:
        """Rows of pieces, each by its place in its piece; None where one of the pieces is not here."""
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
    """These rows of every leaf."""
    index = torch.from_numpy(rows)
    return mapped(tree, lambda leaf: leaf.index_select(0, index))


def nested(like: Any, values: Iterator[torch.Tensor]) -> Any:
    """The same nesting as ``like``, with these leaves."""
    return mapped(like, lambda _: next(values))


def private(name: str, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of this process alone; what is not used of it is not taken from the system either."""
    return torch.zeros(length, dtype=dtype) if name == "where" else torch.empty(length, dtype=dtype)
