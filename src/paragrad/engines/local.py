"""The local engine: worker processes and shared memory on one machine; only this process applies commits."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.data.generated import Generated
from paragrad.engines.exchange.center_loop import CenterLoop, one_thread
from paragrad.engines.exchange.slot import BROUGHT, HANDED, WANTED
from paragrad.engines.exchange.statefiles import StateFiles
from paragrad.engines.exchange.worker import LocalWorker, SharedMemory
from paragrad.engines.process import devices, forkserver
from paragrad.engines.process.children import Child, kill_if_stopped
from paragrad.engines.process.forkserver import Fd
from paragrad.engines.process.segment import Segment
from paragrad.engines.rowfeed.shared_rows import allocate_rows
from paragrad.engines.rowfeed.supervisor import RowFeed
from paragrad.errors import UsageError
from paragrad.learners.learner import Learner, is_aliasable
from paragrad.rundir.session import Session
from paragrad.schemes.traits import is_shared
from paragrad.types import Commit, Reply, WorkerState


@dataclass(frozen=True)
class Local:
    """Worker processes on one machine that exchange through shared memory. A lost worker is replaced.

    Choose it for any model on one machine: it needs no setup.
    Not when one machine is not enough.
    """

    workers: int = 2
    """Number of worker processes."""
    threads: int | None = None
    """Threads per worker; by default the cores that this process may use are divided among the workers."""
    on_failure: Literal["raise", "replace"] = "raise"
    """Reaction to a worker's exception: raise ends the run, replace starts a new worker, as for one that was killed."""
    replace_after: float = 5.0
    """Seconds after which other workers no longer wait for a lost worker, and a stopped one is killed."""
    device: str = "cpu"
    """Device of the workers' models; the center stays in main memory."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"workers={self.workers}, but at least 1 worker is needed.")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"threads={self.threads}, but a worker needs at least 1 thread.")
        if self.on_failure not in ("raise", "replace"):
            raise UsageError(f"on_failure={self.on_failure!r}, but it must be 'raise' or 'replace'.")

    @property
    def threads_each(self) -> int:
        """Threads per worker."""
        return self.threads or max(1, devices.usable_cores() // self.workers)

    def threads_for(self, learner: Learner) -> int:
        """Return the number of threads of a worker's model."""
        return self.threads_each

    def prepare(self) -> None:
        """Start the fork server, which loads torch while the caller prepares the run."""
        forkserver.server()

    def check(self, job: Job, learner: Learner) -> None:
        """Raise if this engine cannot run the job."""
        if is_shared(job.scheme) and (self.device != "cpu" or not is_aliasable(learner)):
            raise UsageError(
                f"The workers of {type(job.scheme).__name__} share their weights, which must be of one type and in main "
                "memory: use a model of float32 or float64 alone and device='cpu'."
            )
        devices.check(self.device, job.make_learner)
        if isinstance(job.train, Generated) and not job.train.again:
            raise UsageError(
                f"{job.train.what} has already begun, so it cannot be sent to the process that reads rows for the workers: "
                "give a function that makes it, as pg.Generated(lambda: batches(), ...), or the generator function itself."
            )

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        """Train from the learner's weights, and return the center at the end."""
        with one_thread(), _LocalLoop(self, job, session, learner) as loop:
            loop.run()
            return loop.center


@dataclass
class _Worker:
    """One rank and the process that works for it."""

    child: Child
    commits: int = 0
    deaths: int = 0
    """Deaths since its last commit."""
    ready: bool = False
    finished: bool = False
    lost_at: float | None = None
    given_up: bool = False


class _LocalLoop(CenterLoop):
    """The center's loop with workers that are children of this process; replaces lost ones."""

    engine: Local

    def __init__(self, engine: Local, job: Job, session: Session, learner: Learner) -> None:
        super().__init__(engine, job, session, learner, Segment(), by_reference=True)
        self._states = StateFiles(session.directory)
        self._states.clear()
        session.missing, session.announce = self._owing_states, self._want
        self._doorbells = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(engine.workers)]
        sizes = {"workers": engine.workers, "window": self._window}
        feed = allocate_rows(job, self._segment.allocate, **sizes)
        start = partial(self._start_child, "reader")
        self._rows = None if feed is None else RowFeed(job, session, feed, self._segment, start, **sizes)
        self._workers: list[_Worker] = []

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        self._states.clear()
        for fd in self._doorbells:
            os.close(fd)
        if self._rows:
            self._rows.close()

    def run(self) -> None:
        """Start the workers, pass the start barrier, and apply commits until no rows are left or the run is stopped."""
        if self._rows:
            self._rows.begin(self.center.leases.floor)
        for rank in range(self.engine.workers):
            self._workers.append(_Worker(self._start_worker(rank, 0)))
        while not all(worker.ready for worker in self._workers) and self.session.stopped is None:
            self._turn()
        if self.session.stopped is None:
            self._begun = True
            self.session.go()
            replies: list[Reply] = []
            for rank, worker in enumerate(self._workers):
                replies += self.center.join(rank, worker.child.incarnation)
            self._deliver(replies)
        while self.session.stopped is None and not all(worker.finished for worker in self._workers):
            self._turn()
        self._part()
        self._finish()

    # -- messages -------------------------------------------------------------------------------------------

    def _announce(self, rank: int) -> None:
        os.eventfd_write(self._doorbells[rank], 1)

    def _on_messages(self) -> None:
        if self._rows:
            self._rows.publish(self.center.leases.floor)

    def _on_commit(self, commit: Commit) -> None:
        commit.state = self._brought(commit.worker, commit.sequence)
        worker = self._workers[commit.worker]
        worker.commits += 1
        worker.deaths = 0

    def _on_ready(self, rank: int, incarnation: int) -> None:
        worker = self._workers[rank]
        worker.ready, worker.lost_at, worker.given_up = True, None, False
        if self._begun:
            self._deliver(self.center.join(rank, incarnation))

    def _on_left(self, rank: int) -> None:
        self._workers[rank].finished = True
        if (last := self.center.last(rank)) and rank not in self.center.private.states:
            self.center.private.keep(rank, self._brought(rank, last))

    # -- private state of workers ---------------------------------------------------------------------------

    def _owing_states(self) -> list[int]:
        present = (rank for rank, worker in enumerate(self._workers) if not worker.finished and not worker.given_up)
        return sorted(set(present).intersection(self.center.may_bring))

    def _want(self, wanted: bool) -> None:
        for slot in self._slots:
            slot.states[WANTED] = wanted

    def _brought(self, rank: int, sequence: int) -> WorkerState | None:
        """Return the state that was written with a commit: empty if the disk was full, None if it was not wanted."""
        number = int(self._slots[rank].states[BROUGHT])
        if abs(number) != sequence:
            return None
        return self._states.take(rank, sequence) if number > 0 else {}

    def _deliver(self, replies: list[Reply]) -> None:
        for reply in replies:
            if reply.sequence < 0:
                handed = reply.state is not None and self._states.put(reply.worker, reply.sequence, reply.state)
                self._slots[reply.worker].states[HANDED] = handed
        super()._deliver(replies)

    # -- processes ------------------------------------------------------------------------------------------

    def _start_worker(self, rank: int, incarnation: int) -> Child:
        bell = self._doorbells[rank]
        memory = SharedMemory(
            workers=self.engine.workers,
            window=self._window,
            segment=Fd(self._segment.fd),
            layout=self._segment.layout,
            messages=Fd(self._message_end),
            doorbell=Fd(bell),
            row_bell=Fd(self._rows.bell if self._rows else bell),
        )
        role = LocalWorker(rank, incarnation, memory, self.engine.device, self.session.directory.resolve())
        child = self.children.start(
            self.task(f"worker-{rank}", role, threads=self.engine.threads_each),
            on_exit=partial(self._on_exit, rank),
            on_note=self._on_note,
            incarnation=incarnation,
        )
        self.session.emit("worker", rank=rank, pid=child.process.pid, incarnation=incarnation)
        return child

    def _mind(self, now: float) -> None:
        after = self.engine.replace_after
        if self._rows:
            self._rows.mind(now, after)
        for rank, worker in enumerate(self._workers):
            if worker.finished:
                continue
            if worker.lost_at is not None and not worker.given_up and now - worker.lost_at > after:
                worker.given_up = True
                if self._begun:
                    self._deliver(self.center.leave(rank))
            kill_if_stopped(worker.child, now, after)

    def _on_exit(self, rank: int, child: Child) -> None:
        self._drain_messages()
        worker = self._workers[rank]
        done = rank not in self.center.live
        if worker.finished or (child.process.exitcode == 0 and child.error is None and worker.commits and done):
            worker.finished = True
            return
        worker.deaths = self._report_lost(rank, child, worker.deaths)
        worker.ready = False
        worker.lost_at = worker.lost_at or time.monotonic()
        worker.child = self._start_worker(rank, child.incarnation + 1)
