"""The local engine: worker processes and shared memory on one machine; this process alone applies commits."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Literal

from paragrad.center import Center
from paragrad.data.generated import Generated
from paragrad.engines import devices, processes
from paragrad.engines.children import Child
from paragrad.engines.crew import Crew, one_thread
from paragrad.engines.lectern import lay_out
from paragrad.engines.reading import Reading
from paragrad.engines.shared import Segment
from paragrad.errors import UsageError
from paragrad.job import Job
from paragrad.learners.learner import Learner, is_aliasable
from paragrad.session import Session
from paragrad.types import Reply


@dataclass(frozen=True)
class Local:
    """Worker processes on one machine, exchanging through shared memory; a lost one is replaced.

    Choose it for any model on one machine: it needs nothing else.
    Not when one machine is not enough.
    """

    workers: int = 2
    """How many worker processes."""
    threads: int | None = None
    """Threads of each worker; by default the cores that this process may use, shared out."""
    on_failure: Literal["raise", "replace"] = "raise"
    """What a worker's exception does: end the run, or have the worker replaced as if it had been killed."""
    replace_after: float = 5.0
    """Seconds until others no longer wait for a lost worker, and until a stopped one is given up."""
    device: str = "cpu"
    """Where the workers' models are; the center stays in main memory."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"workers={self.workers}, but at least 1 worker is needed.")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"threads={self.threads}, but a worker needs at least 1 thread.")
        if self.on_failure not in ("raise", "replace"):
            raise UsageError(f"on_failure={self.on_failure!r}, but a failure can 'raise' or 'replace'.")

    @property
    def threads_each(self) -> int:
        """Threads of each worker."""
        return self.threads or max(1, processes.usable_cores() // self.workers)

    def threads_for(self, learner: Learner) -> int:
        """Threads that a worker's model computes with."""
        return self.threads_each

    def prepare(self) -> None:
        """Begin to start what takes time, beside whatever else is done before ``run``."""
        processes.server()

    def check(self, job: Job, learner: Learner) -> None:
        """Raise where this engine cannot do what the job asks for."""
        if job.scheme.aliased and (self.device != "cpu" or not is_aliasable(learner)):
            raise UsageError(
                f"The workers of {type(job.scheme).__name__} share their weights, which must be of one type and in main "
                "memory: use a model of float32 or float64 alone and device='cpu'."
            )
        devices.check(self.device)
        if isinstance(job.train, Generated) and not job.train.again:
            raise UsageError(
                f"{job.train.what} has begun already, and cannot be sent to the process that reads rows for the workers: give "
                "a function that makes it, as pg.Generated(lambda: batches(), ...), or the generator function itself."
            )

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        """Train; returns the center as it is in the end. ``learner`` gives the starting point."""
        with one_thread(), _Crew(self, job, session, learner) as crew:
            crew.work()
            return crew.center


class _Crew(Crew):
    """Workers as children of this process: starts them, replaces the lost."""

    def __init__(self, engine: Local, job: Job, session: Session, learner: Learner) -> None:
        super().__init__(engine, job, session, learner, Segment(), by_reference=True)
        self._replace_after = engine.replace_after
        lectern = lay_out(job, self._segment.allocate, workers=engine.workers, window=self._window)
        self._reading = None if lectern is None else Reading(job, session, lectern, self._start_reader)
        self._members: list[Child] = []

    def __enter__(self) -> _Crew:
        super().__enter__()
        return self

    def _children(self) -> list[Child]:
        reader = self._reading.child if self._reading else None
        return [*self._members, *super()._children(), *([] if reader is None else [reader])]

    def work(self) -> None:
        """Start everyone, pass the start barrier, apply commits until the rows are used up or a stop is asked for."""
        if self._reading:
            self._reading.begin(self.center.leases.floor)
        for rank in range(self.engine.workers):
            self._members.append(self._start(rank, incarnation=0))
        while not all(member.ready for member in self._members) and self.session.stopped is None:
            self._turn()
        if self.session.stopped is None:
            self._begun = True
            self.session.go()
            replies: list[Reply] = []
            for rank in range(self.engine.workers):
                replies += self.center.join(rank, self._members[rank].incarnation)
            self._deliver(replies)
        while self.session.stopped is None and not all(member.finished for member in self._members):
            self._turn()
        self.session.end()

    # -- what workers say -----------------------------------------------------------------------------------

    def _announce(self, rank: int) -> None:
        os.eventfd_write(self._doorbells[rank], 1)

    def _heard(self) -> None:
        if self._reading:
            self._reading.publish(self.center.leases.floor)

    def _on_commit(self, rank: int) -> None:
        member = self._members[rank]
        member.commits += 1
        member.deaths = 0

    def _on_ready(self, rank: int, incarnation: int) -> None:
        member = self._members[rank]
        member.ready = True
        member.lost_at = None
        member.given_up = False
        if self._begun:
            self._deliver(self.center.join(rank, incarnation))

    def _on_left(self, rank: int) -> None:
        self._members[rank].finished = True

    # -- what becomes of them -------------------------------------------------------------------------------

    def _mind(self, now: float) -> None:
        if self._reading:
            self._reading.mind(now, self._replace_after)
        for rank, member in enumerate(self._members):
            if member.finished:
                continue
            if member.lost_at is not None and not member.given_up and now - member.lost_at > self._replace_after:
                member.given_up = True
                if self._begun:
                    self._deliver(self.center.leave(rank))
            if member.process.pid is not None and processes.is_stopped(member.process.pid):
                member.stopped_at = member.stopped_at or now
                if now - member.stopped_at > self._replace_after:
                    member.process.kill()
            else:
                member.stopped_at = None

    def _start_reader(self, incarnation: int) -> Child:
        return self._start(self.engine.workers + 1, incarnation=incarnation, role="reader")

    def _member(self, rank: int) -> Child:
        """Workers are numbered first, then the process that validates, then the one that reads."""
        if rank < self.engine.workers:
            return self._members[rank]
        if rank == self.engine.workers:
            return super()._member(rank)
        assert self._reading is not None
        member = self._reading.child
        assert member is not None
        return member

    def _on_death(self, rank: int) -> None:
        if rank > self.engine.workers:
            self._on_reader_death(rank)
            return
        member = self._let_go(rank)
        code = member.process.exitcode
        done = rank not in self.center.live
        if member.finished or (code == 0 and member.error is None and member.commits and done):
            member.finished = True
            return
        self._mourn(rank, member)
        replacement = self._start(rank, incarnation=member.incarnation + 1)
        replacement.commits = member.commits
        replacement.deaths = member.deaths
        replacement.lost_at = member.lost_at or time.monotonic()
        replacement.given_up = member.given_up
        self._members[rank] = replacement

    def _on_reader_death(self, rank: int) -> None:
        assert self._reading is not None
        member = self._member(rank)
        self._on_notes(rank)
        self._watch.drop(member.process.sentinel)
        self._watch.drop(member.notes.fd)
        self._reading.on_death(self.center.leases.floor)
