"""Rows in shared memory, laid out by one process and copied out by all workers of a host."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paragrad.data.arena import Arena, nested, picked
from paragrad.data.generated import Generated
from paragrad.data.plan import BlockPlan, Plan, Rows, SequentialPlan
from paragrad.data.source import Orderly, Source, leaves
from paragrad.data.stream import BUFFER_BYTES, Streamed
from paragrad.engines.shared import Segment
from paragrad.job import Job
from paragrad.state import Allocate

FLOOR, PASSED, READS = range(3)
"""What is written in ``control``: the lowest position that is not retired (by the parent); how far the reader is, and how
often any reader has laid out rows."""
SHORTEST, LONGEST = 0.0002, 0.005
"""Seconds between two looks of a worker that waits for rows."""
READ_AHEAD = 65_536
"""Rows of a generator that are read ahead, where they are not wide."""


@dataclass(frozen=True)
class Seat:
    """Who looks at the rows."""

    rank: int
    workers: int
    window: int
    bell: int
    """The reader's doorbell."""


class Lectern:
    """What the reader and the workers share, but for the rows themselves."""

    def __init__(self, allocate: Allocate, *, workers: int) -> None:
        self._allocate = allocate
        self.control: Rows = self.allocate("control", 3, torch.int64).numpy()
        self.waiting: Rows = self.allocate("waiting", workers, torch.int64).numpy()
        """Of each worker that waits: how far the reader must come for it."""

    def allocate(self, name: str, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate, or open, a tensor that belongs to the rows."""
        return self._allocate(f"rows.{name}", length, dtype)

    @classmethod
    def open(cls, segment: Segment, *, workers: int) -> Lectern:
        """As a child sees it."""
        return cls(lambda name, length, dtype: segment.tensor(name), workers=workers)


def is_shared(layout: dict[str, Any]) -> bool:
    """Whether rows lie in a segment of this layout."""
    return "rows.control" in layout


def arena_of(source: Streamed, plan: BlockPlan, lectern: Lectern, *, life: int = 0) -> Arena:
    """Room for the present block and the next one, and for a piece that does not fit at the end of the ring."""
    capacity = min(len(source), 2 * plan.longest_block + 2 * source.longest)
    return Arena(source.row, pieces=len(source.lengths), capacity=capacity, allocate=lectern.allocate, life=life)


class Belt:
    """The rows of a generator: row r lies at r modulo the capacity, until the commit that holds it has been applied."""

    def __init__(self, source: Generated, plan: Plan, lectern: Lectern, *, window: int) -> None:
        row_bytes = sum(leaf[0].numel() * leaf.element_size() for leaf in leaves(source.sample))
        outstanding = len(lectern.waiting) * window * plan.batch_size
        self.capacity = max(4 * outstanding, min(READ_AHEAD, BUFFER_BYTES // row_bytes), 1)
        self._leaves = [
            lectern.allocate(f"leaf{k}", self.capacity * leaf[0].numel(), leaf.dtype).view(self.capacity, *leaf.shape[1:])
            for k, leaf in enumerate(leaves(source.sample))
        ]
        self._tree = nested(source.sample, iter(self._leaves))

    def put(self, first: int, tree: Any) -> None:
        """Lay out rows from number ``first`` on."""
        index = torch.arange(first, first + len(leaves(tree)[0])) % self.capacity
        for room, leaf in zip(self._leaves, leaves(tree), strict=True):
            room.index_copy_(0, index, leaf)

    def gather(self, rows: Rows) -> Any:
        """Rows by their numbers."""
        return picked(self._tree, rows % self.capacity)


class _Shared:
    """A worker's view of a source that one process reads for all."""

    def __init__(self, source: Source, lectern: Lectern, seat: Seat) -> None:
        assert isinstance(source, Orderly)
        self._source = source
        self._length = len(source)
        self._lectern = lectern
        self._rank = seat.rank
        self._bell = seat.bell
        lectern.waiting[self._rank] = 0

    def __len__(self) -> int:
        return self._length

    def plan(self, *, batch_size: int, epochs: int, seed: int) -> Plan:
        return self._source.plan(batch_size=batch_size, epochs=epochs, seed=seed)

    def example(self, rows: int) -> Any:
        return self._source.example(rows)

    def _wait(self, until: int) -> None:
        """Until the reader has come that far. A reader that was lost is replaced: there is nothing else to watch for."""
        control, pause = self._lectern.control, SHORTEST
        if control[PASSED] >= until:
            return
        self._lectern.waiting[self._rank] = until
        os.eventfd_write(self._bell, 1)
        while control[PASSED] < until:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)
        self._lectern.waiting[self._rank] = 0


class SharedPieces(_Shared):
    """Rows of pieces on disk. Those of a worker so far behind that its block has made way are read by itself."""

    def __init__(self, source: Streamed, plan: BlockPlan, lectern: Lectern, seat: Seat) -> None:
        super().__init__(source, lectern, seat)
        self._own = source
        self._arena = arena_of(source, plan, lectern)

    def batch(self, rows: Rows) -> Any:
        return self._own.batch(rows)

    def at(self, plan: Plan, position: int) -> Any:
        """The mini-batch at a position, once the reader has come that far."""
        assert isinstance(plan, BlockPlan)
        pieces, inside = self._own.located(plan.rows_of(position))
        batch = self._arena.gather(pieces, inside)
        if batch is None:
            self._wait(plan.pieces_of(position)[1])
            batch = self._arena.gather(pieces, inside)
        return self._own.gather_missing(pieces, inside, self._arena, keep=False) if batch is None else batch


class SharedRows(_Shared):
    """Rows of a generator."""

    def __init__(self, source: Generated, plan: Plan, lectern: Lectern, seat: Seat) -> None:
        super().__init__(source, lectern, seat)
        self._own = source
        self._belt = Belt(source, plan, lectern, window=seat.window)

    def batch(self, rows: Rows) -> Any:
        return self._own.batch(rows)

    def at(self, plan: Plan, position: int) -> Any:
        """The mini-batch at a position, once the reader has come that far; it stays until its commit has been applied."""
        rows = plan.rows_of(position)
        self._wait(int(rows[-1]) + 1)
        return self._belt.gather(rows)


def lay_out(job: Job, allocate: Allocate, *, workers: int, window: int) -> Lectern | None:
    """Allocate what a job's rows are shared in; None where each process has them itself."""
    source, plan = job.train, job.plan
    if not isinstance(source, Streamed | Generated):
        return None
    lectern = Lectern(allocate, workers=workers)
    if isinstance(source, Streamed):
        assert isinstance(plan, BlockPlan)
        arena_of(source, plan, lectern)
    else:
        Belt(source, plan, lectern, window=window)
    return lectern


def open_source(job: Job, segment: Segment, seat: Seat) -> Source:
    """A worker's source over the rows that are shared."""
    lectern = Lectern.open(segment, workers=seat.workers)
    if isinstance(job.train, Streamed):
        assert isinstance(job.plan, BlockPlan)
        return SharedPieces(job.train, job.plan, lectern, seat)
    assert isinstance(job.train, Generated)
    assert isinstance(job.plan, SequentialPlan)
    return SharedRows(job.train, job.plan, lectern, seat)


def is_awaited(lectern: Lectern, place: int) -> bool:
    """Whether a worker waits for what is read at that place, or after it."""
    return bool(np.any(lectern.waiting > place))
