"""The process that reads rows into shared memory for all workers of a machine: each piece once, ahead of them."""

from __future__ import annotations

import math
import multiprocessing
import os
import select
from dataclasses import dataclass
from typing import Any

from paragrad.core.job import Job
from paragrad.data.generated import Generated, first_row
from paragrad.data.plan import BlockPlan, Plan
from paragrad.data.source import leaves, mapped
from paragrad.data.stream import Streamed
from paragrad.engines.process.forkserver import Fd
from paragrad.engines.process.segment import Layout, Segment
from paragrad.engines.process.task import Report
from paragrad.engines.rowfeed.shared_rows import FLOOR, PASSED, READS, FeedControl, RowRing, arena_of

LOOK = 0.02
"""Seconds between checks whether rows may be overwritten; a waiting worker rings the bell."""


@dataclass(frozen=True)
class ReadsRows:
    """The role of the reading process: read ahead of the workers until all rows are read."""

    segment: Fd
    layout: Layout
    workers: int
    window: int
    doorbell: Fd
    incarnation: int

    def __call__(self, job: Job, report: Report) -> None:
        feed = FeedControl.open(Segment(self.segment.open(), self.layout), workers=self.workers)
        bell = self.doorbell.open()
        os.set_blocking(bell, False)
        if isinstance(job.train, Streamed):
            assert isinstance(job.plan, BlockPlan)
            _read_pieces(job.train, job.plan, feed, bell, life=self.incarnation)
        else:
            assert isinstance(job.train, Generated)
            _allow_children()
            _read_generator(job.train, job.plan, feed, bell, window=self.window)
        while True:
            _pause(bell, None)


def _allow_children() -> None:
    """Let a DataLoader start processes, by fork as in a plain script: another fork server would take seconds."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)


def _read_pieces(source: Streamed, plan: BlockPlan, feed: FeedControl, bell: int, *, life: int) -> None:
    """Read pieces in the order of the plan, from the workers' position to the end of the last epoch."""
    arena, control = arena_of(source, plan, feed, life=life), feed.control
    everything_fits = arena.capacity >= len(source)
    first = plan.pieces_of(int(control[FLOOR]))[0]
    # Declare all pieces missing before clearing them, so that a worker that continues does not take old rows for new ones.
    control[PASSED] = first
    arena.clear()
    for place in range(first, plan.places):
        piece = plan.piece_at(place)
        rows = int(source.lengths[piece])
        if rows and not (everything_fits and arena.where[piece]):
            # Overwrite only retired pieces, unless a worker waits: it must not wait for a slower one.
            while not feed.is_awaited(place):
                needed = plan.pieces_of(int(control[FLOOR]))[0]
                if all(victim.due < needed for victim in arena.victims(rows)):
                    break
                _pause(bell, LOOK)
            here = arena.take(piece, rows)
            arena.put(piece, source.load(piece) if here is None else here, due=place)
            control[READS] += 1
        control[PASSED] = place + 1


def _read_generator(source: Generated, plan: Plan, feed: FeedControl, bell: int, *, window: int) -> None:
    control = feed.control
    ring = RowRing(source, plan, feed, window=window)
    upto, total = 0, plan.rows * plan.epochs
    skipped = first_row(plan, int(control[FLOOR]))
    for chunk in source.chunks(plan):
        rows = len(leaves(chunk)[0])
        start = max(0, min(rows, skipped - upto))
        while start < rows and upto + start < total:
            room = first_row(plan, int(control[FLOOR])) + ring.capacity - (upto + start)
            if room <= 0:
                _pause(bell, LOOK)
                continue
            stop = min(rows, start + room)
            ring.put(upto + start, mapped(chunk, lambda leaf: leaf[start:stop]))  # noqa: B023
            control[READS] += 1
            control[PASSED] = upto + stop
            start = stop
        upto += rows


def _pause(bell: int, seconds: float | None) -> None:
    """Sleep until a worker rings the bell, for at most this long."""
    ready = select.poll()  # select() accepts no descriptor above 1023
    ready.register(bell, select.POLLIN)
    if ready.poll(None if seconds is None else math.ceil(1000 * seconds)):
        os.eventfd_read(bell)
