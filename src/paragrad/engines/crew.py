"""The center's side of a run whose workers are processes of their own: commits are applied in the order of one pipe."""

from __future__ import annotations

import contextlib
import os
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch

from paragrad import kernels
from paragrad.center import Center
from paragrad.engines import children, processes
from paragrad.engines.children import Child, Watch
from paragrad.engines.localworker import Post, Way
from paragrad.engines.processes import Fd
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


class Employs(Protocol):
    """What a crew asks of its engine."""

    @property
    def workers(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def threads_each(self) -> int: ...

    @property
    def on_failure(self) -> str: ...


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


def make_center(
    job: Job,
    learner: Learner,
    *,
    workers: int,
    shards: str,
    allocate: Allocate,
    by_reference: bool = True,
    length: int | None = None,
) -> Center:
    """The center at the beginning of a run, with the workers' weights within its reach where that is of use."""
    center = job.make_center(learner, workers=workers, shards=shards, allocate=allocate, length=length)
    like = learner.weights
    if by_reference and job.by_reference(center) and is_aliasable(learner):
        center.homes = [allocate(f"home{rank}", like.numel(), like.dtype) for rank in range(workers)]
    return center


def longest_window(job: Job) -> int:
    """Mini-batches that a worker can have on lease, at most: a window, and with overlap the next."""
    return min(job.plan.positions, job.scheme.window * (1 + job.scheme.overlap))


class Crew(ABC):
    """Hears of commits, applies them, delivers the answers; validates and saves beside that. Who the workers are, and how an
    answer reaches one, is for those who inherit it to say."""

    def __init__(
        self,
        engine: Employs,
        job: Job,
        session: Session,
        learner: Learner,
        segment: Segment,
        *,
        by_reference: bool,
        length: int | None = None,
    ) -> None:
        self.engine = engine
        self.job = job
        self.session = session
        self._segment = segment
        self.center = make_center(
            job,
            learner,
            workers=engine.workers,
            shards=session.run.shards,
            allocate=segment.allocate,
            by_reference=by_reference,
            length=length,
        )
        self._attach()
        self._window = longest_window(job)
        self._slots = [
            Slot.make(
                segment.allocate,
                rank,
                job,
                learner,
                window=self._window,
                by_reference=bool(self.center.homes),
                residuals=by_reference,
                part=length,
            )
            for rank in range(engine.workers)
        ]
        self._parcel = Parcel(job)
        self._messages, self._mouth = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._mouth, True)
        self._doorbells = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(engine.workers + 2)]
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._evaluator: Child | None = None
        self._watch = Watch()
        self._watch.add(self._messages, "messages")
        self._watch.add(self._wake, "wake")
        self._begun = False
        self._partial = b""
        # A worker that asks whether there is a queue looks at the pipe: what is not yet being seen to must stay in it.
        self._gulp = 1 if job.scheme.sees_queue else 64
        self._signals = Signals(session, at_once=self._kill_all, waker=self._waker)

    # -- what those who inherit it say ------------------------------------------------------------------------

    def _attach(self) -> None:
        self.session.attach(self.center)

    def _children(self) -> list[Child]:
        """All processes of ours."""
        return [] if self._evaluator is None else [self._evaluator]

    @abstractmethod
    def _announce(self, rank: int) -> None:
        """An answer lies in this worker's slot."""

    @abstractmethod
    def _on_ready(self, rank: int, incarnation: int) -> None:
        """A worker has warmed up."""

    def _on_commit(self, rank: int) -> None:  # noqa: B027 - a hook: most have nothing to do here
        """A worker's commit is about to be received."""

    @abstractmethod
    def _on_left(self, rank: int) -> None:
        """A worker has done all that there was for it."""

    @abstractmethod
    def _on_death(self, rank: int) -> None:
        """A process of ours has ended."""

    def _member(self, rank: int) -> Child:
        """The process of ours of that number: workers first, then the one that validates."""
        assert rank == self.engine.workers
        assert self._evaluator is not None
        return self._evaluator

    def _line(self) -> Way | None:
        """How a process of ours finds a center that it does not share memory with."""
        return None

    @abstractmethod
    def _mind(self, now: float) -> None:
        """Look after the workers, now and then."""

    def _shown(self) -> Segment:
        """Where the process that validates reads the center."""
        return self._segment

    def _show(self) -> None:  # noqa: B027 - a hook: most have nothing to do here
        """The center is about to be looked at there."""

    def _heard(self) -> None:  # noqa: B027 - a hook: most have nothing to do here
        """Some messages have been seen to."""

    # -- life -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Crew:
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._children():
            processes.kill(member.process)
            member.notes.close()
        self._signals.__exit__()
        self._parcel.close()
        self._segment.close()
        for fd in (self._messages, self._mouth, self._wake, self._waker, *self._doorbells):
            os.close(fd)

    def _kill_all(self) -> None:
        for member in self._children():
            with contextlib.suppress(ProcessLookupError):
                member.process.kill()

    # -- the run --------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for the next thing to happen, and see to it."""
        for fd, kind, rank in self._watch.wait(min(TICK, self.session.next_due())):
            if kind == "messages":
                self._hear()
            elif kind == "wake":
                os.read(fd, 4096)
            elif kind == "death" and rank == self.engine.workers:
                self._on_evaluator_death()
            elif kind == "death":
                self._on_death(rank)
            elif kind == "notes":
                self._on_notes(rank)
        self.session.attend()
        if self.job.validation is not None and self.session.validation_due():
            self._show()
            if self._evaluator is None:
                self._evaluator = self._start(self.engine.workers, incarnation=0, role="evaluator")
            os.eventfd_write(self._doorbells[self.engine.workers], 1)
        self._mind(time.monotonic())

    def _hear(self) -> None:
        try:
            data = self._partial + os.read(self._messages, MESSAGE.size * self._gulp)
        except BlockingIOError:
            return
        whole = len(data) - len(data) % MESSAGE.size
        self._partial = data[whole:]
        for rank, op, incarnation, sequence in MESSAGE.iter_unpack(data[:whole]):
            if op == Op.COMMIT:
                self._receive(rank, sequence)
            elif op == Op.READY:
                self._on_ready(rank, incarnation)
            elif op == Op.LEFT:
                self._on_left(rank)
        self._heard()

    def _hear_all(self) -> None:
        """A dead worker's last messages may still be in the pipe: what it committed counts."""
        ready = select.poll()
        ready.register(self._messages, select.POLLIN)
        while ready.poll(0):
            self._hear()

    def _receive(self, rank: int, sequence: int) -> None:
        commit = self._slots[rank].get_commit(self.job.scheme.parts)
        if self.center.homes:
            commit.value = self.center.homes[rank]
        assert commit.sequence == sequence, f"slot {rank} holds commit {commit.sequence}, the pipe says {sequence}"
        self._on_commit(rank)
        self._deliver(self.center.receive(commit))

    def _deliver(self, replies: list[Reply]) -> None:
        for reply in replies:
            self._slots[reply.worker].put_reply(reply)
            self._announce(reply.worker)

    # -- children -------------------------------------------------------------------------------------------

    def _start(
        self,
        rank: int,
        *,
        incarnation: int,
        role: str = "worker",
        kind: type[Post] = Post,
        name: str | None = None,
        **more: Any,
    ) -> Child:
        segment = self._shown() if role == "evaluator" else self._segment
        fill = partial(
            kind,
            workers=self.engine.workers,
            threads=1 if role in ("evaluator", "reader", "shard") else self.engine.threads_each,
            device=self.engine.device,
            parcel=Fd(self._parcel.fd),
            parcel_start=self._parcel.start,
            parcel_size=self._parcel.size,
            segment=Fd(segment.fd),
            layout=segment.layout,
            messages=Fd(self._mouth),
            doorbell=Fd(self._doorbells[min(rank, self.engine.workers + 1)]),
            reader=Fd(self._doorbells[-1]),
            window=self._window,
            line=self._line(),
            **more,
        )
        logs = self.session.directory / "logs"
        child = children.start(fill, rank, self._watch, logs, incarnation=incarnation, role=role, name=name)
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

    def _let_go(self, rank: int) -> Child:
        """A process of ours has ended: hear what it had to say, and wait for it."""
        member = self._member(rank)
        self._watch.drop(member.process.sentinel)
        self._on_notes(rank)
        self._watch.drop(member.notes.fd)
        self._hear_all()
        member.process.join()
        return member

    def _mourn(self, rank: int, member: Child) -> None:
        """A worker of ours was lost: say so, and raise where that ends the run."""
        reason = processes.describe_exit(member.process.exitcode)
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
