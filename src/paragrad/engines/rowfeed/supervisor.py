"""The parent's side of the process that reads rows for all workers: starts, informs and replaces it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias

from paragrad.core.job import Job
from paragrad.data.generated import Generated
from paragrad.engines.process.children import Child, OnExit, OnNote, kill_if_stopped
from paragrad.engines.process.forkserver import Fd
from paragrad.engines.process.launcher import describe_exit
from paragrad.engines.process.segment import Segment
from paragrad.engines.process.task import Role
from paragrad.engines.rowfeed.reader import ReadsRows
from paragrad.engines.rowfeed.shared_rows import FLOOR, READS, FeedControl
from paragrad.errors import ReadError, UsageError
from paragrad.rundir.session import Session

DEATHS = 3
"""Consecutive deaths of the reader, without any rows read, that end the run."""

Start: TypeAlias = Callable[[Role, OnExit, OnNote, int], Child]
"""Starts a process, with functions to call when it ends and when it reports something, and its incarnation."""


class RowFeed:
    """Keeps one reading process running."""

    def __init__(
        self, job: Job, session: Session, feed: FeedControl, segment: Segment, start: Start, *, workers: int, window: int
    ) -> None:
        self._source = job.train
        self._session = session
        self._feed = feed
        self._segment = segment
        self._start = start
        self._sizes = {"workers": workers, "window": window}
        self._deaths = 0
        self._reads = 0
        self._floor = 0
        self.bell = os.eventfd(0, os.EFD_CLOEXEC)
        """Doorbell that workers ring when they wait for rows."""
        self.child: Child | None = None

    def begin(self, floor: int, *, incarnation: int = 0) -> None:
        """Start a reader at the lowest position that is not retired."""
        self.publish(floor)
        self._reads = int(self._feed.control[READS])
        segment = self._segment
        role = ReadsRows(Fd(segment.fd), segment.layout, doorbell=Fd(self.bell), incarnation=incarnation, **self._sizes)
        self.child = self._start(role, self._on_exit, self._on_note, incarnation)
        self._session.emit("reader", pid=self.child.process.pid, incarnation=incarnation)
        if isinstance(self._source, Generated) and floor:
            message = f"{self._source.what} is read again from its beginning; rows that were already trained on are skipped."
            self._session.emit("note", message=message)

    def publish(self, floor: int) -> None:
        """Set the lowest position that is not retired, for the reader."""
        self._floor = self._feed.control[FLOOR] = floor

    def mind(self, now: float, after: float) -> None:
        """Kill a reader that has been stopped for longer than ``after`` seconds, if it can be replaced."""
        if self.child is not None and not isinstance(self._source, Generated):
            kill_if_stopped(self.child, now, after)

    def close(self) -> None:
        """Close the doorbell."""
        os.close(self.bell)

    def _on_note(self, kind: str, what: Any) -> None:
        self._session.emit(kind, message=what)

    def _on_exit(self, child: Child) -> None:
        """Replace a reader of files; raise if the rows of a generator are lost."""
        if child.error is not None and child.error["usage"]:
            raise UsageError(child.error["usage"])
        if child.error is not None:
            raise ReadError(f"The process that reads the rows raised an exception.\n\n{child.error['text'].rstrip()}")
        why = describe_exit(child.process)
        if isinstance(self._source, Generated):
            raise ReadError(
                f"The process that reads the rows {why}. The rows that {self._source.what} gave it are lost, so the run ends. "
                "Resume it: it then reads the rows again from the beginning."
            )
        has_read = int(self._feed.control[READS]) > self._reads
        self._deaths = 1 if has_read else self._deaths + 1
        if self._deaths >= DEATHS:
            log = self._session.directory / "logs" / "reader.log"
            raise ReadError(f"The process that reads the rows {why} {DEATHS} times without reading any rows. Its log is {log}.")
        self._session.emit("warning", message=f"The process that reads the rows {why}; it is replaced.")
        self.begin(self._floor, incarnation=child.incarnation + 1)
