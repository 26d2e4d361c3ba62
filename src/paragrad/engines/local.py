"""The local engine: worker processes and shared memory on one machine; this process alone applies commits."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from paragrad import kernels
from paragrad.center import Center
from paragrad.data.generated import Generated
from paragrad.engines import children, devices, processes
from paragrad.engines.children import Child, Watch
from paragrad.engines.lectern import lay_out
from paragrad.engines.localworker import Post
from paragrad.engines.processes import Fd
from paragrad.engines.reading import Reading
from paragrad.engines.shared import Parcel, Segment
from paragrad.engines.signals import Signals
from paragrad.engines.slot import MESSAGE, Op, Slot
from paragrad.errors import UsageError, WorkerError
from paragrad.job import Job
from paragrad.learners.learner import Learner, is_aliasable
from paragrad.session import Session
from paragrad.state import Allocate
from paragrad.types import Reply

DEATHS = 3
"""Deaths of one worker without a commit in between that end the run."""

TICK = 0.5
"""Seconds between looks at the clock and at stopped workers."""


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


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The applier works in blocks on one core: torch's own threads would spin beside the workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    kernels.use_threads(min(2, processes.usable_cores()))
    try:
        yield
    finally:
        kernels.use_threads(1)
        torch.set_num_threads(before)


def make_center(job: Job, learner: Learner, *, workers: int, shards: str, allocate: Allocate) -> Center:
    """The center at the beginning of a run, with the workers' weights within its reach where that is of use."""
    center = job.make_center(learner, workers=workers, shards=shards, allocate=allocate)
    like = learner.weights
    if job.by_reference(center) and is_aliasable(learner):
        center.homes = [allocate(f"home{rank}", like.numel(), like.dtype) for rank in range(workers)]
    return center


def longest_window(job: Job) -> int:
    """Mini-batches that a commit can be made of, at most."""
    return min(job.plan.positions, job.scheme.window + job.scheme.overlap)


class _Crew:
    """The parent's side of one run: starts workers, applies their commits in the order of the pipe, replaces the lost."""

    def __init__(self, engine: Local, job: Job, session: Session, learner: Learner) -> None:
        self.engine = engine
        self.job = job
        self.session = session
        self._segment = Segment()
        scheme = job.scheme
        self.center = make_center(
            job, learner, workers=engine.workers, shards=session.run.shards, allocate=self._segment.allocate
        )
        session.attach(self.center)
        self._window = longest_window(job)
        self._slots = [
            Slot.make(
                self._segment.allocate,
                rank,
                scheme,
                like=learner.weights,
                buffers=learner.buffers.numel(),
                integers=learner.integers.numel(),
                window=self._window,
                by_reference=bool(self.center.homes),
            )
            for rank in range(engine.workers)
        ]
        lectern = lay_out(job, self._segment.allocate, workers=engine.workers, window=self._window)
        self._reading = None if lectern is None else Reading(job, session, lectern, self._start_reader)
        self._parcel = Parcel(job)
        self._messages, self._mouth = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._mouth, True)
        self._doorbells = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(engine.workers + 2)]
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._members: list[Child] = []
        self._evaluator: Child | None = None
        self._watch = Watch()
        self._watch.add(self._messages, "messages")
        self._watch.add(self._wake, "wake")
        self._begun = False
        self._partial = b""
        # A worker that asks whether there is a queue looks at the pipe: what is not yet being seen to must stay in it.
        self._gulp = 1 if scheme.early else 64
        self._signals = Signals(session, at_once=self._kill_all, waker=self._waker)

    # -- life -----------------------------------------------------------------------------------------------

    def __enter__(self) -> _Crew:
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        others = [self._evaluator, self._reading.child if self._reading else None]
        for member in [*self._members, *(child for child in others if child is not None)]:
            processes.kill(member.process)
            member.notes.close()
        self._signals.__exit__()
        self._parcel.close()
        self._segment.close()
        for fd in (self._messages, self._mouth, self._wake, self._waker, *self._doorbells):
            os.close(fd)

    def _kill_all(self) -> None:
        for member in self._members:
            with contextlib.suppress(ProcessLookupError):
                member.process.kill()

    # -- the run --------------------------------------------------------------------------------------------

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

    def _turn(self) -> None:
        """Wait for the next thing to happen, and see to it."""
        for fd, kind, rank in self._watch.wait(min(TICK, self.session.next_due())):
            if kind == "messages":
                self._hear()
            elif kind == "wake":
                os.read(fd, 4096)
            elif kind == "death":
                self._on_death(rank)
            elif kind == "notes":
                self._on_notes(rank)
        self._on_clock()

    def _hear(self) -> None:
        try:
            data = self._partial + os.read(self._messages, MESSAGE.size * self._gulp)
        except BlockingIOError:
            return
        whole = len(data) - len(data) % MESSAGE.size
        self._partial = data[whole:]
        for worker, op, incarnation, sequence in MESSAGE.iter_unpack(data[:whole]):
            if op == Op.COMMIT:
                self._on_commit(worker, sequence)
            elif op == Op.READY:
                self._on_ready(worker, incarnation)
            elif op == Op.LEFT:
                self._members[worker].finished = True
        if self._reading:
            self._reading.publish(self.center.leases.floor)

    def _on_commit(self, worker: int, sequence: int) -> None:
        commit = self._slots[worker].get_commit(self.job.scheme.parts)
        if self.center.homes:
            commit.value = self.center.homes[worker]
        assert commit.sequence == sequence, f"slot {worker} holds commit {commit.sequence}, the pipe says {sequence}"
        member = self._members[worker]
        member.commits += 1
        member.deaths = 0
        self._deliver(self.center.receive(commit))

    def _on_ready(self, worker: int, incarnation: int) -> None:
        member = self._members[worker]
        member.ready = True
        member.lost_at = None
        member.given_up = False
        if self._begun:
            self._deliver(self.center.join(worker, incarnation))

    def _deliver(self, replies: list[Reply]) -> None:
        for reply in replies:
            self._slots[reply.worker].put_reply(reply)
            os.eventfd_write(self._doorbells[reply.worker], 1)

    # -- the clock ------------------------------------------------------------------------------------------

    def _on_clock(self) -> None:
        session = self.session
        session.attend()
        if self.job.validation is not None and session.validation_due():
            if self._evaluator is None:
                self._evaluator = self._start(self.engine.workers, incarnation=0, role="evaluator")
            os.eventfd_write(self._doorbells[self.engine.workers], 1)
        now = time.monotonic()
        if self._reading:
            self._reading.mind(now, self.engine.replace_after)
        for rank, member in enumerate(self._members):
            if member.finished:
                continue
            if member.lost_at is not None and not member.given_up and now - member.lost_at > self.engine.replace_after:
                member.given_up = True
                if self._begun:
                    self._deliver(self.center.leave(rank))
            if member.process.pid is not None and processes.is_stopped(member.process.pid):
                member.stopped_at = member.stopped_at or now
                if now - member.stopped_at > self.engine.replace_after:
                    member.process.kill()
            else:
                member.stopped_at = None

    # -- children -------------------------------------------------------------------------------------------

    def _start_reader(self, incarnation: int) -> Child:
        return self._start(self.engine.workers + 1, incarnation=incarnation, role="reader")

    def _start(self, rank: int, *, incarnation: int, role: str = "worker") -> Child:
        fill = partial(
            Post,
            workers=self.engine.workers,
            threads=self.engine.threads_each if role == "worker" else 1,
            device=self.engine.device,
            parcel=Fd(self._parcel.fd),
            parcel_start=self._parcel.start,
            parcel_size=self._parcel.size,
            segment=Fd(self._segment.fd),
            layout=self._segment.layout,
            messages=Fd(self._mouth),
            doorbell=Fd(self._doorbells[rank]),
            reader=Fd(self._doorbells[-1]),
            window=self._window,
        )
        logs = self.session.directory / "logs"
        child = children.start(fill, rank, self._watch, logs, incarnation=incarnation, role=role)
        if role == "worker":
            self.session.emit("worker", rank=rank, pid=child.process.pid, incarnation=incarnation)
        return child

    def _on_notes(self, rank: int) -> None:
        member = self._member(rank)
        for message in member.notes.read():
            if "error" in message:
                member.error = message
            elif "warning" in message:
                self.session.emit("warning", message=message["warning"])
            elif "found" in message:
                self.session.validated(message["found"], message["clock"], message["seconds"])
        if member.notes.ended:
            self._watch.drop(member.notes.fd)

    def _member(self, rank: int) -> Child:
        """Workers are numbered first, then the process that validates, then the one that reads."""
        if rank < self.engine.workers:
            return self._members[rank]
        if rank == self.engine.workers:
            assert self._evaluator is not None
            return self._evaluator
        assert self._reading is not None
        member = self._reading.child
        assert member is not None
        return member

    def _on_death(self, rank: int) -> None:
        if rank == self.engine.workers:
            self._on_evaluator_death()
            return
        if rank > self.engine.workers:
            self._on_reader_death(rank)
            return
        member = self._members[rank]
        self._watch.drop(member.process.sentinel)
        self._on_notes(rank)
        self._watch.drop(member.notes.fd)
        self._hear_all()
        member.process.join()
        code = member.process.exitcode
        if member.finished or (code == 0 and member.error is None and member.commits and self._is_done(rank)):
            member.finished = True
            return
        reason = processes.describe_exit(code)
        self.session.emit(
            "lost",
            rank=rank,
            pid=member.process.pid,
            incarnation=member.incarnation,
            reason=reason if member.error is None else member.error["error"],
        )
        log = self.session.directory / "logs" / f"worker-{rank}.log"
        if member.error is not None and member.error["usage"]:
            raise UsageError(member.error["usage"])
        if member.error is not None and self.engine.on_failure == "raise":
            raise WorkerError(rank, f"it raised an exception.\n\n{member.error['error'].rstrip()}\n\nIts log is {log}.")
        member.deaths += 1
        if member.deaths >= DEATHS:
            detail = f"\n\n{member.error['error'].rstrip()}" if member.error else ""
            raise WorkerError(
                rank, f"it {reason} {DEATHS} times without making a commit, so the run is ended. Its log is {log}.{detail}"
            )
        member.notes.close()
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

    def _on_evaluator_death(self) -> None:
        member = self._evaluator
        assert member is not None
        self._on_notes(self.engine.workers)
        self._watch.drop(member.process.sentinel)
        self._watch.drop(member.notes.fd)
        member.process.join()
        why = member.error["error"] if member.error else processes.describe_exit(member.process.exitcode)
        member.notes.close()
        self._evaluator = None
        if member.error is not None:
            raise WorkerError(-1, f"validation raised an exception.\n\n{why}")
        self.session.emit("warning", message=f"The process that validates {why}; it is started again when next needed.")
        self.session.skip_validation()

    def _hear_all(self) -> None:
        """A dead worker's last messages may still be in the pipe: what it committed counts."""
        ready = select.poll()
        ready.register(self._messages, select.POLLIN)
        while ready.poll(0):
            self._hear()

    def _is_done(self, rank: int) -> bool:
        return rank not in self.center.live
