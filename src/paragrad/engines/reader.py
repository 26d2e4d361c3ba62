"""The process that reads rows for all workers of a host: each piece once, ahead of them, into shared memory."""

from __future__ import annotations

import math
import multiprocessing
import os
import select
from typing import Any

from paragrad.data.arena import Arena
from paragrad.data.generated import Generated, first_row
from paragrad.data.plan import BlockPlan
from paragrad.data.source import leaves, mapped
from paragrad.data.stream import Streamed
from paragrad.engines.lectern import FLOOR, PASSED, READS, Belt, Lectern, arena_of, is_awaited
from paragrad.engines.localworker import Post, guarded
from paragrad.engines.shared import Segment
from paragrad.job import Job

LOOK = 0.02
"""Seconds between two looks at whether rows may go; a worker that waits rings."""


def reader_main(post: Post) -> None:
    """Read ahead of the workers until everything has been read."""
    guarded(post, _read)


def _read(post: Post, job: Job) -> None:
    lectern = Lectern.open(Segment(post.segment.open(), post.layout), workers=post.workers)
    bell = post.doorbell.open()
    os.set_blocking(bell, False)
    if isinstance(job.train, Streamed):
        assert isinstance(job.plan, BlockPlan)
        _Pieces(job.train, job.plan, lectern, bell, life=post.incarnation).run()
    else:
        assert isinstance(job.train, Generated)
        _allow_children()
        _run_generator(job.train, job, lectern, bell, window=post.window)
    while True:
        _pause(bell, None)


def _allow_children() -> None:
    """Let a DataLoader have processes of its own, started as in a plain script: a fork server of its own takes seconds."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)


class _Pieces:
    """Pieces in the order of the plan; one makes way when the blocks it belongs to are retired, or when a worker waits."""

    def __init__(self, source: Streamed, plan: BlockPlan, lectern: Lectern, bell: int, *, life: int) -> None:
        self._source, self._plan, self._lectern, self._bell = source, plan, lectern, bell
        self._arena: Arena = arena_of(source, plan, lectern, life=life)

    def run(self) -> None:
        """Read until the end of the last epoch, from where the workers are."""
        plan, control, lengths = self._plan, self._lectern.control, self._source.lengths
        everything_fits = self._arena.capacity >= len(self._source)
        place = plan.pieces_of(int(control[FLOOR]))[0]
        # First say that nothing is there: a worker that is past the wait must not take what is gone for what is to come.
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
        """Wait until all that would be written over may go; but never let a worker wait for one that is behind."""
        floor = self._lectern.control
        while not is_awaited(self._lectern, place):
            needed = self._plan.pieces_of(int(floor[FLOOR]))[0]
            if all(victim.due < needed for victim in self._arena.victims(rows)):
                return
            _pause(self._bell, LOOK)


def _run_generator(source: Generated, job: Job, lectern: Lectern, bell: int, *, window: int) -> None:
    plan, control = job.plan, lectern.control
    belt = Belt(source, plan, lectern, window=window)
    upto, total = 0, plan.rows * plan.epochs
    skipped = first_row(plan, int(control[FLOOR]))
    for chunk in source.chunks(plan):
        rows = len(leaves(chunk)[0])
        start = max(0, min(rows, skipped - upto))
        while start < rows and upto + start < total:
            room = first_row(plan, int(control[FLOOR])) + belt.capacity - (upto + start)
            if room <= 0:
                _pause(bell, LOOK)
                continue
            stop = min(rows, start + room)
            belt.put(upto + start, mapped(chunk, lambda leaf: leaf[start:stop]))  # noqa: B023
            control[READS] += 1
            control[PASSED] = upto + stop
            start = stop
        upto += rows


def _pause(bell: int, seconds: float | None) -> None:
    """Sleep until a worker rings, or so long at most."""
    ready = select.poll()  # select() knows no descriptor above 1023
    ready.register(bell, select.POLLIN)
    if ready.poll(None if seconds is None else math.ceil(1000 * seconds)):
        os.eventfd_read(bell)
