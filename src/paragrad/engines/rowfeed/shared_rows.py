"""Rows in shared memory: one process writes them, all workers of a machine copy them out."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paragrad.core.job import Job
from paragrad.core.state import Allocate
from paragrad.data.arena import Arena, nested, picked
from paragrad.data.generated import Generated
from paragrad.data.plan import BlockPlan, Plan, Rows
from paragrad.data.source import Source, leaves
from paragrad.data.stream import BUFFER_BYTES, Streamed
from paragrad.engines.process.segment import Segment

FLOOR, PASSED, READS = range(3)
"""Indices of ``control``: lowest position that is not retired (set by the parent), the reader's position, number of reads."""
SHORTEST, LONGEST = 0.0002, 0.005
"""Seconds between checks of a worker that waits for rows."""
READ_AHEAD = 65_536
"""Rows of a generator that are read ahead, unless they are wide."""


@dataclass(frozen=True)
class Consumer:
    """A worker that reads the rows."""

    rank: int
    workers: int
    window: int
    bell: int
    """The reader's doorbell."""


class FeedControl:
    """Numbers that the reading process and the workers share, next to the rows."""

    def __init__(self, allocate: Allocate, *, workers: int) -> None:
        self._allocate = allocate
        self.control: Rows = self.allocate("control", 3, torch.int64).numpy()
        self.waiting: Rows = self.allocate("waiting", workers, torch.int64).numpy()
        """Per worker: the place that the reader must reach; 0 if it does not wait."""

    def allocate(self, name: str, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate, or open, a tensor that belongs to the rows."""
        return self._allocate(f"rows.{name}", length, dtype)

    @classmethod
    def open(cls, segment: Segment, *, workers: int) -> FeedControl:
        """Open the numbers in another process."""
        return cls(lambda name, length, dtype: segment.tensor(name), workers=workers)

    def is_awaited(self, place: int) -> bool:
        """Return whether a worker waits for the piece at that place or after it."""
        return bool(np.any(self.waiting > place))


def has_rows(layout: dict[str, Any]) -> bool:
    """Return whether a segment of this layout holds rows."""
    return "rows.control" in layout


def arena_of(source: Streamed, plan: BlockPlan, feed: FeedControl, *, life: int = 0) -> Arena:
    """Return memory for the present block, the next one, and a piece that does not fit at the end of the ring."""
    capacity = min(len(source), 2 * plan.longest_block + 2 * source.longest)
    return Arena(source.row, pieces=len(source.lengths), capacity=capacity, allocate=feed.allocate, life=life)


class RowRing:
    """Rows of a generator: row r is at r modulo the capacity until its commit is applied."""

    def __init__(self, source: Generated, plan: Plan, feed: FeedControl, *, window: int) -> None:
        row_bytes = sum(leaf[0].numel() * leaf.element_size() for leaf in leaves(source.sample))
        outstanding = len(feed.waiting) * window * plan.batch_size
        self.capacity = max(4 * outstanding, min(READ_AHEAD, BUFFER_BYTES // row_bytes), 1)
        self._leaves = [
            feed.allocate(f"leaf{k}", self.capacity * leaf[0].numel(), leaf.dtype).view(self.capacity, *leaf.shape[1:])
            for k, leaf in enumerate(leaves(source.sample))
        ]
        self._tree = nested(source.sample, iter(self._leaves))

    def put(self, first: int, tree: Any) -> None:
        """Write rows from number ``first`` on."""
        index = torch.arange(first, first + len(leaves(tree)[0])) % self.capacity
        for room, leaf in zip(self._leaves, leaves(tree), strict=True):
            room.index_copy_(0, index, leaf)

    def gather(self, rows: Rows) -> Any:
        """Return rows by their numbers."""
        return picked(self._tree, rows % self.capacity)


class _Shared:
    """A worker's view of a source that one process reads for all workers."""

    def __init__(self, source: Streamed | Generated, feed: FeedControl, consumer: Consumer) -> None:
        self._source = source
        self._feed = feed
        self._rank = consumer.rank
        self._bell = consumer.bell
        feed.waiting[self._rank] = 0

    def __len__(self) -> int:
        return len(self._source)

    def plan(self, *, batch_size: int, epochs: int, seed: int) -> Plan:
        return self._source.plan(batch_size=batch_size, epochs=epochs, seed=seed)

    def batch(self, rows: Rows) -> Any:
        return self._source.batch(rows)

    def example(self, rows: int) -> Any:
        return self._source.example(rows)

    def _wait(self, until: int) -> None:
        """Wait until the reader has reached a position. A lost reader is replaced, so the worker need not watch it."""
        control, pause = self._feed.control, SHORTEST
        if control[PASSED] >= until:
            return
        self._feed.waiting[self._rank] = until
        os.eventfd_write(self._bell, 1)
        while control[PASSED] < until:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)
        self._feed.waiting[self._rank] = 0


class SharedPieces(_Shared):
    """Rows of pieces on disk. A worker that is so late that its block was overwritten reads its rows itself."""

    _source: Streamed

    def __init__(self, source: Streamed, plan: BlockPlan, feed: FeedControl, consumer: Consumer) -> None:
        super().__init__(source, feed, consumer)
        self._arena = arena_of(source, plan, feed)

    def at(self, plan: Plan, position: int) -> Any:
        """Return the mini-batch at a position, once the reader has reached it."""
        assert isinstance(plan, BlockPlan)
        pieces, inside = self._source.located(plan.rows_of(position))
        batch = self._arena.gather(pieces, inside)
        if batch is None:
            self._wait(plan.pieces_of(position)[1])
            batch = self._arena.gather(pieces, inside)
        return self._source.gather_missing(pieces, inside, self._arena, keep=False) if batch is None else batch


class SharedRows(_Shared):
    """Rows of a generator."""

    def __init__(self, source: Generated, plan: Plan, feed: FeedControl, consumer: Consumer) -> None:
        super().__init__(source, feed, consumer)
        self._ring = RowRing(source, plan, feed, window=consumer.window)

    def at(self, plan: Plan, position: int) -> Any:
        """Return the mini-batch at a position, once the reader has reached it; it stays until its commit is applied."""
        rows = plan.rows_of(position)
        self._wait(int(rows[-1]) + 1)
        return self._ring.gather(rows)


def allocate_rows(job: Job, allocate: Allocate, *, workers: int, window: int) -> FeedControl | None:
    """Allocate memory for a job's rows; return None if each process has them itself."""
    source, plan = job.train, job.plan
    if not isinstance(source, Streamed | Generated):
        return None
    feed = FeedControl(allocate, workers=workers)
    if isinstance(source, Streamed):
        assert isinstance(plan, BlockPlan)
        arena_of(source, plan, feed)
    else:
        RowRing(source, plan, feed, window=window)
    return feed


def open_source(job: Job, segment: Segment, consumer: Consumer) -> Source:
    """Return a worker's source over the shared rows."""
    feed = FeedControl.open(segment, workers=consumer.workers)
    if isinstance(job.train, Streamed):
        assert isinstance(job.plan, BlockPlan)
        return SharedPieces(job.train, job.plan, feed, consumer)
    assert isinstance(job.train, Generated)
    return SharedRows(job.train, job.plan, feed, consumer)
