"""A worker's side of the exchange: answers the requests of its loop over memory that it shares with the center."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Protocol

import torch

from paragrad.core.job import Job
from paragrad.core.replica import Replica, Untrained
from paragrad.core.worker import Driver, Ports, Pulled, Window, another_optimizer, run_window, work
from paragrad.data.seeds import seed_everything
from paragrad.data.source import example
from paragrad.engines.exchange.slot import BROUGHT, HANDED, MESSAGE, WANTED, Op, Slot
from paragrad.engines.exchange.statefiles import StateFiles
from paragrad.engines.process.forkserver import Fd
from paragrad.engines.process.segment import Layout, Segment
from paragrad.engines.process.task import Report
from paragrad.engines.rowfeed.shared_rows import Consumer, has_rows, open_source
from paragrad.errors import UsageError
from paragrad.learners.learner import Learner, Recovers, WarmsUp, is_aliasable, load_marked, marked
from paragrad.schemes.scheme import Scheme
from paragrad.schemes.traits import is_shared, pull_every, pulls_before_commit
from paragrad.types import Commit, Done, Reply, Vector, WorkerState


class ReadsCenter(Protocol):
    """Reads the center between exchanges."""

    def pull(self, value: Vector) -> int:
        """Copy the center into ``value``; return its clock."""

    @property
    def live_value(self) -> Vector:
        """The value itself, for schemes whose workers write into it."""


class CenterReader:
    """Reads a consistent state of the center from a segment; retries if the center overwrote it meanwhile."""

    def __init__(self, segment: Segment, *, aliased: bool = False) -> None:
        self._control = segment.tensor("control")
        self._values = [segment.tensor(f"value{0 if aliased else i}") for i in (0, 1)]
        self._numbers = [segment.tensor(f"numbers{i}") for i in (0, 1)]

    def pull(self, value: Vector) -> int:
        while True:
            flips = int(self._control[0])
            side = flips & 1
            value.copy_(self._values[side])
            clock = int(self._numbers[side][0])
            # The buffer that was current at ``flips`` is overwritten once control[1] is flips + 3.
            if int(self._control[1]) <= flips + 2:
                return clock

    @property
    def live_value(self) -> Vector:
        return self._values[0]


class Exchange(Ports):
    """Answers a worker's requests over a slot. Subclasses announce commits and wait for replies."""

    def __init__(
        self,
        job: Job,
        learner: Learner,
        slot: Slot,
        reader: ReadsCenter,
        *,
        workers: int,
        incarnation: int,
        answer: Vector | None,
        home: Vector | None,
    ) -> None:
        """``answer``: vector that the center writes replies into; None: the worker pulls them. ``home``: memory for the weights
        that the center can access."""
        self._job = job
        self._learner = learner
        self._slot = slot
        self._reader = reader
        self._answer = answer
        scheme = job.scheme
        if is_shared(scheme) or home is not None:
            assert is_aliasable(learner)
            learner.alias(reader.live_value if home is None else home)
        self.me = Replica(
            learner.weights,
            rank=slot.worker,
            workers=workers,
            slots=scheme.worker_slots,
            out=self._where_to_write(),
        )
        self.me.untrained = Untrained(learner.buffers, learner.integers)
        self.me.by_reference = home is not None
        self.me.feedback = job.feedback(learner.weights, slot.residuals or None)
        self._seen = self._where_to_pull() if answer is None and not is_shared(scheme) else None
        self._fresh = torch.empty_like(learner.weights) if pulls_before_commit(scheme) or pull_every(scheme) else None
        self._waiting_for = -1 - incarnation
        self._keeps = job.keeps(learner)
        self._last_brought = 0
        """Sequence of the last commit if it brought this worker's private state; otherwise 0."""

    def _where_to_write(self) -> Vector | None:
        """Return the slot's vector, or the weights; None if a gradient is computed while the center may read the slot."""
        scheme, value = self._job.scheme, self._slot.value
        if scheme.overlap and scheme.ships == "gradient":
            return None
        return value if value.numel() else self._learner.weights

    def _where_to_pull(self) -> Vector:
        """Return the vector for pulled replies: the weights themselves if the scheme needs neither anchor nor ``adopt``."""
        scheme, weights = self._job.scheme, self._learner.weights
        straight = scheme.ships == "gradient" and type(scheme).adopt is Scheme.adopt and not scheme.overlap
        return weights if straight else torch.empty_like(weights)

    # -- requests of the loop -------------------------------------------------------------------------------

    def window(self, request: Window) -> Done:
        return run_window(self._job.scheme, self.me, self._learner, self._job.train, self._job.plan, request)

    def pull(self) -> Pulled:
        assert self._fresh is not None
        return Pulled(self._fresh, self._reader.pull(self._fresh))

    def send(self, commit: Commit) -> None:
        commit.buffers, commit.integers = self._learner.buffers, self._learner.integers
        commit.state = self._state() if self._keeps and self.is_state_wanted else None
        self._last_brought = 0 if commit.state is None else commit.sequence
        self._waiting_for = commit.sequence
        self._slot.put_commit(commit)

    def receive(self) -> Reply:
        if self._answer is not None:
            return self._slot.get_reply(self._answer)
        if self._seen is None:
            return self._slot.get_reply(self._reader.live_value)
        clock = self._reader.pull(self._seen)
        reply = self._slot.get_reply(self._seen)
        reply.version, reply.placed = clock, self._seen is self._learner.weights
        return reply

    def scatter(self) -> None:
        self._job.scatter(self._learner, self.me.rank)

    def recover(self) -> None:
        if isinstance(self._learner, Recovers):
            self._learner.recover()

    def restore(self, optimizer: WorkerState) -> None:
        if not load_marked(self._learner, optimizer):
            self.warn(another_optimizer(self.me.rank))

    def keep(self) -> None:
        if self._keeps and not self._last_brought:
            self.bring(self._state())

    # -- for subclasses -------------------------------------------------------------------------------------

    @property
    def is_state_wanted(self) -> bool:
        """True if the next commit must bring this worker's private state."""
        return True

    def bring(self, state: WorkerState) -> None:
        """Send the private state after the last commit."""

    def warn(self, message: str) -> None:
        """Report a warning to the user."""

    @property
    def is_answered(self) -> bool:
        """True if the reply to the last commit, or to joining, has arrived."""
        return self._slot.is_answered(self._waiting_for)

    def check(self) -> None:
        """Raise if the model's parameters are no longer in the vector that is exchanged."""
        self._learner.check()

    def _state(self) -> WorkerState:
        return self.me.state(self._job.scheme.adopts_from, marked(self._learner, self._learner.state()))


@dataclass(frozen=True)
class SharedMemory:
    """Everything a worker process needs to exchange with the center through shared memory."""

    workers: int
    window: int
    """Largest number of mini-batches on lease to one worker."""
    segment: Fd
    layout: Layout
    messages: Fd
    """Write end of the pipe that orders the commits of all workers."""
    doorbell: Fd
    """Rings when a reply has arrived."""
    row_bell: Fd
    """Doorbell of the process that reads rows for all workers."""

    def open(self) -> Segment:
        """Map the memory."""
        return Segment(self.segment.open(), self.layout)


class SharedExchange(Exchange):
    """The exchange of a worker process on the center's machine: messages announce commits, a doorbell announces replies."""

    def __init__(
        self, memory: SharedMemory, job: Job, learner: Learner, *, rank: int, incarnation: int, directory: Path, report: Report
    ) -> None:
        segment = memory.open()
        reader = CenterReader(segment, aliased=is_shared(job.scheme))
        self._number = rank, incarnation
        self._report = report
        self._states = StateFiles(directory)
        self._pipe = memory.messages.open()
        self._doorbell = memory.doorbell.open()
        mine, center = learner.weights, reader.live_value
        if (mine.numel(), mine.dtype) != (center.numel(), center.dtype):
            raise UsageError(
                f"Worker {rank} built a model of {mine.numel():,} values ({mine.dtype}), but the center has "
                f"{center.numel():,} ({center.dtype}). Every worker must build the same model."
            )
        answer, home = f"answer{rank}", f"home{rank}"
        slot = Slot.make(
            lambda name, *_: segment.tensor(name),
            rank,
            job,
            learner,
            window=memory.window,
            by_reference=home in memory.layout,
            residuals=True,
        )
        super().__init__(
            job,
            learner,
            slot,
            reader,
            workers=memory.workers,
            incarnation=incarnation,
            answer=segment.tensor(answer) if answer in memory.layout else None,
            home=segment.tensor(home) if home in memory.layout else None,
        )

    def window(self, request: Window) -> Done:
        done = super().window(request)
        if self._job.scheme.early == "queue":
            waiting = fcntl.ioctl(self._pipe, termios.FIONREAD, b"\0\0\0\0")
            done.busy = struct.unpack("i", waiting)[0] > 0
        return done

    @property
    def is_state_wanted(self) -> bool:
        return bool(self._slot.states[WANTED])

    def send(self, commit: Commit) -> None:
        """Write the commit into the slot, then announce it: only the announcement makes it count."""
        super().send(commit)
        if commit.state is None:
            self._slot.states[BROUGHT] = 0  # a predecessor's state for the same sequence does not count
        else:
            self.bring(commit.state)
        self.announce(Op.COMMIT, commit.sequence)

    def bring(self, state: WorkerState) -> None:
        number = self._waiting_for
        self._slot.states[BROUGHT] = number if self._states.put(self._number[0], number, state) else -number

    def warn(self, message: str) -> None:
        self._report("warning", message)

    def announce(self, op: Op, sequence: int = 0) -> None:
        """Write one message of 16 bytes into the shared pipe."""
        rank, incarnation = self._number
        os.write(self._pipe, MESSAGE.pack(rank, op, incarnation, sequence))

    def receive(self) -> Reply:
        """Sleep until the reply has arrived, and read it."""
        while not self.is_answered:
            os.eventfd_read(self._doorbell)
        joining = self._waiting_for < 0 and bool(self._slot.states[HANDED])
        self._slot.handed = (self._states.take(self._number[0], self._waiting_for) or None) if joining else None
        return super().receive()


@dataclass(frozen=True)
class LocalWorker:
    """The role of a worker process on the center's machine: train until no rows are left."""

    rank: int
    incarnation: int
    memory: SharedMemory
    device: str
    directory: Path

    def __call__(self, job: Job, report: Report) -> None:
        memory = self.memory
        if has_rows(memory.layout):
            consumer = Consumer(self.rank, memory.workers, memory.window, memory.row_bell.open())
            job = changed(job, train=open_source(job, memory.open(), consumer))
        learner = warm_learner(job, self.device)
        exchange = SharedExchange(
            memory, job, learner, rank=self.rank, incarnation=self.incarnation, directory=self.directory, report=report
        )
        exchange.announce(Op.READY)
        drive(job, exchange, incarnation=self.incarnation)
        exchange.announce(Op.LEFT)


def warm_learner(job: Job, device: str) -> Learner:
    """Make a worker's learner, ready for its first step."""
    seed_everything(job.plan.seed)
    learner = job.make_learner(device)
    if isinstance(learner, WarmsUp):
        learner.warm_up(example(job.train, job.plan))
    return learner


def drive(job: Job, exchange: Exchange, *, incarnation: int) -> None:
    """Run the worker's loop to its end; the exchange answers its requests."""
    loop = work(job.scheme, exchange.me, incarnation=incarnation, distances=job.distances)
    waits = Driver(loop, exchange).go_on()
    assert not waits, "a worker process waits inside its exchange"
    exchange.check()
