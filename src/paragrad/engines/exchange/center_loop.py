"""The center's side of a run with worker processes: applies commits in the order of one pipe and delivers replies."""

from __future__ import annotations

import contextlib
import os
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol, Self

import torch

from paragrad.core import kernels
from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.core.state import Allocate
from paragrad.engines.exchange.slot import MESSAGE, Op, Slot
from paragrad.engines.exchange.validator import Validator
from paragrad.engines.process import devices
from paragrad.engines.process.children import Child, Children, OnExit, OnNote, Poller, wake_by
from paragrad.engines.process.launcher import describe_exit
from paragrad.engines.process.payload import Memfd, pack
from paragrad.engines.process.segment import Segment
from paragrad.engines.process.signals import Signals
from paragrad.engines.process.task import Role, Task
from paragrad.errors import UsageError, WorkerError
from paragrad.learners.learner import Learner, is_aliasable
from paragrad.rundir.session import Session
from paragrad.types import Commit, Reply

DEATHS = 3
"""Deaths of one worker without a commit in between that end the run."""

TICK = 0.5
"""Seconds between checks of the clock and of stopped workers."""


class EngineSettings(Protocol):
    """Settings of an engine that the center's loop needs."""

    @property
    def workers(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def on_failure(self) -> str: ...


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: commits are applied in blocks on one core, and more threads would slow down the workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    kernels.use_threads(min(2, devices.usable_cores()))
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
    partition: str,
    allocate: Allocate,
    by_reference: bool = True,
    length: int | None = None,
) -> Center:
    """Make the center of a run, with access to the workers' weights if the scheme can use it."""
    center = job.make_center(learner, workers=workers, partition=partition, allocate=allocate, length=length)
    like = learner.weights
    if by_reference and job.by_reference(center) and is_aliasable(learner):
        center.homes = [allocate(f"home{rank}", like.numel(), like.dtype) for rank in range(workers)]
    return center


def longest_window(job: Job) -> int:
    """Return the largest number of mini-batches on lease to one worker: a window, and with overlap the next."""
    return min(job.plan.positions, job.scheme.window * (1 + job.scheme.overlap))


class CenterLoop(ABC):
    """Reads messages, applies commits, delivers replies, and validates and saves checkpoints meanwhile.

    Subclasses define where workers run and how a reply reaches one.
    """

    def __init__(
        self,
        engine: EngineSettings,
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
            partition=session.run.partition,
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
        self._storage = Memfd()
        self._payload = pack(job, self._storage)
        self._messages, self._message_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._message_end, True)
        self._wake, self._wake_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poller = Poller()
        self._poller.add(self._messages, self._read_messages)
        self._poller.add(self._wake, self._read_wake)
        self.children = Children(self._poller, wake_by(self._wake_end))
        self._begun = False
        self._parting = False
        self._partial = b""
        # Workers of these schemes check the pipe for a queue, so a message must stay in it until it is handled.
        self._at_once = 1 if job.scheme.early == "queue" else 64
        self._validator = Validator(session.snapshots, partial(self._start_child, "evaluator"), engine.device, session.emit)
        session.snapshots.make_room = self._await_validation
        self._signals = Signals(session, at_once=self.children.kill_at_once, waker=self._wake_end)

    # -- for subclasses -------------------------------------------------------------------------------------

    def _attach(self) -> None:
        self.session.attach(self.center)

    @abstractmethod
    def _announce(self, rank: int) -> None:
        """Announce the reply in this worker's slot."""

    @abstractmethod
    def _on_ready(self, rank: int, incarnation: int) -> None:
        """Handle the message of a worker that has warmed up."""

    def _on_commit(self, commit: Commit) -> None:  # noqa: B027 - an optional hook
        """Handle a commit that the center is about to receive."""

    @abstractmethod
    def _on_left(self, rank: int) -> None:
        """Handle the message of a worker that has no rows left."""

    @abstractmethod
    def _mind(self, now: float) -> None:
        """Watch the workers; called after every wait."""

    def _on_messages(self) -> None:  # noqa: B027 - an optional hook
        """Called after messages were handled."""

    @abstractmethod
    def _owing_states(self) -> list[int]:
        """Return the present workers that have not brought their private state yet."""

    # -- life -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.children.close()
        self._signals.__exit__()
        self._storage.close()
        self._validator.close()
        self._segment.close()
        for fd in (self._messages, self._message_end, self._wake, self._wake_end):
            os.close(fd)

    # -- the run --------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._poller.wait(min(TICK, self.session.next_due()))
        self.children.attend()
        self.session.attend()
        self._validator.attend()
        self._mind(time.monotonic())

    def _read_wake(self) -> None:
        os.read(self._wake, 4096)

    def _part(self) -> None:
        """Let each worker's next commit bring its private state, so that the run can be resumed.

        If updates do not wait for several commits, a worker that has brought it gets no reply and idles.
        """
        self._parting = self.session.stopped is not None and not self.center.round.gathers
        while self._begun and self._owing_states() and self.session.waits_for_workers():
            self._turn()
        self._drain_messages()  # a worker's exit may be noticed before its last message is read

    def _finish(self) -> None:
        """Validate the waiting snapshots after the last commit; not if the run was interrupted: it may be resumed."""
        self.session.time.end()
        while self.session.snapshots.waiting and self.session.stopped != "interrupted":
            self._await_validation()

    def _await_validation(self) -> None:
        """Wait for a report of the validating process, and handle nothing else."""
        self._validator.wait(self.children.end)

    def _read_messages(self) -> None:
        try:
            data = self._partial + os.read(self._messages, MESSAGE.size * self._at_once)
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
        self._on_messages()

    def _drain_messages(self) -> None:
        """Read all messages: the last commits of a dead worker may still be in the pipe, and they count."""
        ready = select.poll()
        ready.register(self._messages, select.POLLIN)
        while ready.poll(0):
            self._read_messages()

    def _receive(self, rank: int, sequence: int) -> None:
        commit = self._slots[rank].get_commit()
        if self.center.homes:
            commit.value = self.center.homes[rank]
        assert commit.sequence == sequence, f"slot {rank} holds commit {commit.sequence}, the pipe says {sequence}"
        self._on_commit(commit)
        self._deliver(self.center.receive(commit))

    def _deliver(self, replies: list[Reply]) -> None:
        for reply in replies:
            if self._parting and reply.sequence >= 0 and reply.worker not in self.center.may_bring:
                continue
            self._slots[reply.worker].put_reply(reply)
            self._announce(reply.worker)

    # -- processes ------------------------------------------------------------------------------------------

    def task(self, name: str, role: Role, *, threads: int = 1) -> Task:
        """Return a task of this run for a child process."""
        return Task(name, self._payload, role, self.session.directory.resolve(), threads)

    def _start_child(self, name: str, role: Role, on_exit: OnExit, on_note: OnNote, incarnation: int = 0) -> Child:
        return self.children.start(self.task(name, role), on_exit=on_exit, on_note=on_note, incarnation=incarnation)

    def _on_note(self, kind: str, what: Any) -> None:
        if kind == "warning":
            self.session.emit("warning", message=what)

    def _report_lost(self, rank: int, child: Child, deaths: int) -> int:
        """Record a lost worker. Raise if that ends the run; otherwise return its deaths since its last commit."""
        process = child.process
        reason = describe_exit(process)
        self.session.emit(
            "lost",
            rank=rank,
            pid=process.pid,
            incarnation=child.incarnation,
            reason=reason if child.error is None else child.error["text"],
        )
        log = self.session.directory / "logs" / f"worker-{rank}.log"
        if child.error is not None and child.error["usage"]:
            raise UsageError(child.error["usage"])
        if child.error is not None and self.engine.on_failure == "raise":
            raise WorkerError(rank, f"it raised an exception.\n\n{child.error['text'].rstrip()}\n\nIts log is {log}.")
        deaths += process.lost is None
        if deaths >= DEATHS:
            detail = f"\n\n{child.error['text'].rstrip()}" if child.error else ""
            raise WorkerError(
                rank, f"it {reason} {DEATHS} times without making a commit, so the run ends. Its log is {log}.{detail}"
            )
        return deaths
