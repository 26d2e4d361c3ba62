"""The process that reads rows for all workers of a machine: each piece once, ahead of them, into shared memory."""

from __future__ import annotations

import math
import multiprocessing
import os
import select
from dataclasses import dataclass
from typing import Any

from paragrad.core.job import Job
from paragrad.data.arena import Arena
from paragrad.data.generated import Generated, first_row
from paragrad.data.plan import BlockPlan
from paragrad.data.source import leaves, mapped
from paragrad.data.stream import Streamed
from paragrad.engines.process.forkserver import Fd
from paragrad.engines.process.segment import Layout, Segment
from paragrad.engines.process.task import Report
from paragrad.engines.rowfeed.shared_rows import FLOOR, PASSED, READS, FeedControl, RowRing, arena_of, is_awaited

LOOK = 0.02
"""Seconds between two looks at whether rows may be overwritten; a worker that waits rings the bell."""


@dataclass(frozen=True)
class ReadsRows:
    """The role of the reading process: reads ahead of the workers until everything has been read."""

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
            _Pieces(job.train, job.plan, feed, bell, life=self.incarnation).run()
        else:
            assert isinstance(job.train, Generated)
            _allow_children()
            _run_generator(job.train, job, feed, bell, window=self.window)
        while True:
            _pause(bell, None)


def _allow_children() -> None:
    """Let a DataLoader have processes of its own, started as in a plain script: a fork server of its own takes seconds."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)


class _Pieces:
    """Pieces in the order of the plan; one is overwritten when its blocks are retired, or when a worker waits."""

    def __init__(self, source: Streamed, plan: BlockPlan, feed: FeedControl, bell: int, *, life: int) -> None:
        self._source, self._plan, self._feed, self._bell = source, plan, feed, bell
        self._arena: Arena = arena_of(source, plan, feed, life=life)

    def run(self) -> None:
        """Read until the end of the last epoch, from where the workers are."""
        plan, control, lengths = self._plan, self._feed.control, self._source.lengths
        everything_fits = self._arena.capacity >= len(self._source)
        place = plan.pieces_of(int(control[FLOOR]))[0]
        # First declare that nothing is there: a worker that waits no longer must not take old rows for new ones.
        control[PASSED] = place
        self._arena.clear()
        while place < plan.places:
            piece = plan.piece_at(place)
            rows = int(lengths[piece])
            if rows and not (everything_fits and self._arena.where[piece]):
                self._make_room(rows, place)
                here = self._arena.take(piece, rows)
                self._arena.put(piece, self._source.load(piece) if here is None else here, due=place)
                control[READS] += 1
            place += 1
            control[PASSED] = place

    def _make_room(self, rows: int, place: int) -> None:
        """Wait until all that would be overwritten is retired; but never let a worker wait for a slower one."""
        floor = self._feed.control
        while not is_awaited(self._feed, place):
            needed = self._plan.pieces_of(int(floor[FLOOR]))[0]
            if all(victim.due < needed for victim in self._arena.victims(rows)):
                return
            _pause(self._bell, LOOK)


def _run_generator(source: Generated, job: Job, feed: FeedControl, bell: int, *, window: int) -> None:
    plan, control = job.plan, feed.control
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
    """Sleep until a worker rings the bell, or for so long."""
    ready = select.poll()  # select() knows no descriptor above 1023
    ready.register(bell, select.POLLIN)
    if ready.poll(None if seconds is None else math.ceil(1000 * seconds)):
        os.eventfd_read(bell)
