"""The parent's side of the process that reads rows for all workers: starting it, telling it what may go, replacing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paragrad.data.generated import Generated
from paragrad.engines import processes
from paragrad.engines.children import Child
from paragrad.engines.lectern import FLOOR, READS, Lectern
from paragrad.errors import ReadError, UsageError
from paragrad.job import Job
from paragrad.session import Session

DEATHS = 3
"""Deaths of the reader without a row read in between that end the run."""


class Reading:
    """One reader at a time, as long as there is one."""

    def __init__(self, job: Job, session: Session, lectern: Lectern, start: Callable[[int], Child]) -> None:
        self._source = job.train
        self._session = session
        self._lectern = lectern
        self._start = start
        self._deaths = 0
        self._reads = 0
        self.child: Child | None = None

    def begin(self, floor: int, *, incarnation: int = 0) -> None:
        """Start a reader that begins where the lowest position that is not retired is."""
        self.publish(floor)
        self._reads = int(self._lectern.control[READS])
        self.child = self._start(incarnation)
        self._session.emit("reader", pid=self.child.process.pid, incarnation=incarnation)
        if isinstance(self._source, Generated) and floor:
            message = f"{self._source.what} is read again from its beginning; rows that were trained on are passed over."
            self._session.emit("note", message=message)

    def publish(self, floor: int) -> None:
        """Rows before this position may go."""
        self._lectern.control[FLOOR] = floor

    def mind(self, now: float, after: float) -> None:
        """A reader that was stopped is given up after so many seconds, where another can take its place."""
        child = self.child
        if child is None or child.process.pid is None or isinstance(self._source, Generated):
            return
        if not processes.is_stopped(child.process.pid):
            child.stopped_at = None
            return
        child.stopped_at = child.stopped_at or now
        if now - child.stopped_at > after:
            child.process.kill()

    def on_death(self, floor: int) -> None:
        """The reader has ended: rows on disk are read by another, those of a generator are lost."""
        child = self.child
        assert child is not None
        child.process.join()
        error: dict[str, Any] | None = child.error
        if error is not None and error["usage"]:
            raise UsageError(error["usage"])
        if error is not None:
            raise ReadError(f"The process that reads the rows raised an exception.\n\n{error['error'].rstrip()}")
        why = processes.describe_exit(child.process.exitcode)
        if isinstance(self._source, Generated):
            raise ReadError(
                f"The process that reads the rows {why}. What {self._source.what} has given it "
                "cannot be had again, so the run is ended; it can be resumed, and reads the rows again from the beginning."
            )
        has_read = int(self._lectern.control[READS]) > self._reads
        self._deaths = 1 if has_read else self._deaths + 1
        if self._deaths >= DEATHS:
            log = self._session.directory / "logs" / "reader.log"
            raise ReadError(f"The process that reads the rows {why} {DEATHS} times without reading any. Its log is {log}.")
        child.notes.close()
        self._session.emit("warning", message=f"The process that reads the rows {why}; another goes on in its place.")
        self.begin(floor, incarnation=child.incarnation + 1)
