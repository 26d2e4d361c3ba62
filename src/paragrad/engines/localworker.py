"""A worker process of the local engine: drives the worker's loop over shared memory, a pipe and a doorbell."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import struct
import sys
import termios
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from paragrad.data.source import example
from paragrad.data.stream import Streamed
from paragrad.engines.lectern import Seat, is_shared, open_source
from paragrad.engines.processes import Fd
from paragrad.engines.shared import Segment, open_parcel
from paragrad.engines.slot import MESSAGE, Op, Slot
from paragrad.errors import UsageError
from paragrad.job import Job
from paragrad.learners.learner import Learner, Recovers, WarmsUp, is_aliasable
from paragrad.replica import Replica, Untrained
from paragrad.schemes.scheme import Scheme
from paragrad.types import Commit, Done, Reply, Vector
from paragrad.worker import (
    Answer,
    Join,
    Pull,
    Pulled,
    Receive,
    Recover,
    Request,
    Scatter,
    Send,
    Window,
    run_window,
    seed_everything,
    work,
)

KEPT_BLOCK = 64 << 20
"""Bytes up to which a worker keeps freed blocks; larger ones, kept, would add up to many times a large layer."""


@dataclass(frozen=True)
class Way:
    """How a child finds a center over a network."""

    directory: Path
    token: str
    shared: bool


@dataclass(frozen=True)
class Post:
    """What a child process is handed: who it is, and its descriptors."""

    rank: int
    incarnation: int
    workers: int
    threads: int
    device: str
    parcel: Fd
    parcel_start: int
    parcel_size: int
    segment: Fd
    layout: dict[str, tuple[int, int, torch.dtype]]
    messages: Fd
    doorbell: Fd
    reader: Fd
    """The doorbell of the process that reads rows for all."""
    window: int
    notes: Fd
    log: Fd
    line: Way | None = None


def worker_main(post: Post) -> None:
    """Train until there are no rows left."""
    guarded(post, _train)


def evaluator_main(post: Post) -> None:
    """Look at the center whenever the doorbell rings."""
    guarded(post, _evaluate)


def guarded(post: Post, body: Callable[[Post, Job], None]) -> None:
    """Send output to the log; tell the parent about an exception before ending with status 1."""
    os.dup2(post.log.open(), 1)
    os.dup2(post.log.open(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _keep_heap()
    torch.set_num_threads(post.threads)
    try:
        job = open_parcel(post.parcel.open(), post.parcel_start, post.parcel_size)
        for source in (job.train, job.validation):
            if isinstance(source, Streamed):
                source.report = partial(_warn, post)
        body(post, job)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        text = traceback.format_exc()
        print(text, file=sys.stderr)
        note(post.notes.open(), {"error": text, "usage": str(error) if isinstance(error, UsageError) else None})
        sys.stderr.flush()
        os._exit(1)


def _warn(post: Post, message: str) -> None:
    note(post.notes.open(), {"warning": message})


def _keep_heap() -> None:
    """Let malloc keep freed blocks: by default it gives large ones back, and every step faults them in again."""
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, KEPT_BLOCK)
        mallopt(m_trim_threshold, (1 << 31) - 1)


def note(fd: int, message: dict[str, object]) -> None:
    """One line of JSON to the parent, on this child's own pipe."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


class Reader:
    """The center, as any process that maps the segment may read it: a whole state, or try again."""

    def __init__(self, segment: Segment, *, aliased: bool = False) -> None:
        self._control = segment.tensor("control")
        self._values = [segment.tensor(f"value{0 if aliased else i}") for i in (0, 1)]
        self._buffers = [segment.tensor(f"buffers{i}") for i in (0, 1)]
        self._integers = [segment.tensor(f"integers{i}") for i in (0, 1)]
        self._numbers = [segment.tensor(f"numbers{i}") for i in (0, 1)]

    def pull(self, value: Vector, buffers: Vector | None = None, integers: Vector | None = None) -> int:
        """Copy the center into ``value``; returns its clock."""
        while True:
            flips = int(self._control[0])
            side = flips & 1
            value.copy_(self._values[side])
            if buffers is not None:
                buffers.copy_(self._buffers[side])
            if integers is not None:
                integers.copy_(self._integers[side])
            clock = int(self._numbers[side][0])
            # A buffer that was current at ``flips`` is written again from control[1] = flips + 3 on.
            if int(self._control[1]) <= flips + 2:
                return clock

    @property
    def live_value(self) -> Vector:
        """The value itself, for schemes whose workers write into it."""
        return self._values[0]


class Reads(Protocol):
    """Who can read the center."""

    def pull(self, value: Vector) -> int:
        """Copy the center into ``value``; returns its clock."""

    @property
    def live_value(self) -> Vector:
        """The value itself."""


class Exchange:
    """How one worker's requests are answered over memory that it shares with the center; ``Posted`` adds the waiting."""

    def __init__(
        self,
        job: Job,
        learner: Learner,
        slot: Slot,
        reader: Reads,
        *,
        workers: int,
        incarnation: int,
        answer: Vector | None,
        home: Vector | None,
    ) -> None:
        self._job = job
        self._learner = learner
        self._slot = slot
        self._reader = reader
        self._answer = answer
        """Where the center lays this worker's answers; None: they are pulled."""
        scheme = job.scheme
        if scheme.aliased or home is not None:
            assert is_aliasable(learner)
            learner.alias(reader.live_value if home is None else home)
        self.me = Replica(
            learner.weights,
            rank=slot.worker,
            workers=workers,
            slots=scheme.worker_slots,
            out=self._where_to_write(),
        )
        self._untrained = Untrained(learner.buffers, learner.integers)
        self.me.by_reference = home is not None
        self.me.feedback = job.feedback(learner.weights, slot.residuals or None)
        self._seen = self._where_to_pull() if answer is None and not scheme.aliased else None
        self._fresh = torch.empty_like(learner.weights) if scheme.fresh or scheme.fetch else None
        self._waiting_for = -1 - incarnation

    def _where_to_write(self) -> Vector | None:
        """Straight into the slot; but not the gradient of a window that runs while the slot is being read."""
        scheme, value = self._job.scheme, self._slot.value
        if scheme.overlap and scheme.ships == "gradient":
            return None
        return value if value.numel() else self._learner.weights

    def _where_to_pull(self) -> Vector:
        """Gradients need no anchor: where they are shipped, and the answer is taken as it is, it is pulled into the weights."""
        scheme, weights = self._job.scheme, self._learner.weights
        straight = scheme.ships == "gradient" and type(scheme).adopt is Scheme.adopt and not scheme.overlap
        return weights if straight else torch.empty_like(weights)

    def answer(self, request: Request) -> Answer:
        """Do what the worker's loop asks for."""
        match request:
            case Window():
                return self.run(request)
            case Send(commit):
                self.send(changed(commit, buffers=self._learner.buffers, integers=self._learner.integers))
                return None
            case Receive() | Join():
                return self.receive()
            case Pull():
                assert self._fresh is not None
                return Pulled(self._fresh, self._reader.pull(self._fresh))
            case Recover():
                if isinstance(self._learner, Recovers):
                    self._learner.recover()
                return None
            case Scatter():
                self._job.scatter(self._learner, self.me.rank)
                return None

    def run(self, request: Window) -> Done:
        """A window of local steps."""
        return run_window(self._job.scheme, self.me, self._learner, self._job.train, self._job.plan, request)

    def send(self, commit: Commit) -> None:
        """Lay out the commit in the slot."""
        self._slot.put_commit(commit)
        self._waiting_for = commit.sequence
        if self._job.scheme.overlap:
            self._untrained.sent()

    @property
    def answered(self) -> bool:
        """Whether the answer to the last commit, or to joining, is there."""
        return self._slot.answered(self._waiting_for)

    def receive(self) -> Reply:
        """Take the answer that is there."""
        reply = self._read_reply()
        self._untrained.adopt(self.me, reply)
        return reply

    def check(self) -> None:
        """Raise where the model has moved out of the vector that is exchanged."""
        self._learner.check()

    def _read_reply(self) -> Reply:
        if self._answer is not None:
            return self._slot.get_reply(self._answer)
        if self._seen is None:
            return self._slot.get_reply(self._reader.live_value)
        clock = self._reader.pull(self._seen)
        placed = self._seen is self._learner.weights
        return changed(self._slot.get_reply(self._seen), version=clock, placed=placed)


class Posted(Exchange):
    """The same in a process of its own: a message says that a commit is laid out, a doorbell that an answer is."""

    def __init__(self, post: Post, job: Job, learner: Learner) -> None:
        segment = Segment(post.segment.open(), post.layout)
        reader = Reader(segment, aliased=job.scheme.aliased)
        self._post = post
        self._pipe = post.messages.open()
        self._doorbell = post.doorbell.open()
        mine, center = learner.weights, reader.live_value
        if (mine.numel(), mine.dtype) != (center.numel(), center.dtype):
            raise UsageError(
                f"Worker {post.rank} built a model of {mine.numel():,} values ({mine.dtype}), but the center has "
                f"{center.numel():,} ({center.dtype}). Every worker must build the same model."
            )
        answer, home = f"answer{post.rank}", f"home{post.rank}"
        slot = Slot.make(
            lambda name, *_: segment.tensor(name),
            post.rank,
            job,
            learner,
            window=post.window,
            by_reference=home in post.layout,
            residuals=True,
        )
        super().__init__(
            job,
            learner,
            slot,
            reader,
            workers=post.workers,
            incarnation=post.incarnation,
            answer=segment.tensor(answer) if answer in post.layout else None,
            home=segment.tensor(home) if home in post.layout else None,
        )

    def run(self, request: Window) -> Done:
        """A window of local steps, and whether the center had a queue at its end."""
        done = super().run(request)
        if self._job.scheme.sees_queue:
            done.busy = self._center_has_a_queue()
        return done

    def send(self, commit: Commit) -> None:
        """Lay out the commit in the slot, then say so: the one write that makes it count."""
        super().send(commit)
        self.say(Op.COMMIT, commit.sequence)

    def say(self, op: Op, sequence: int = 0) -> None:
        """One message of 16 bytes into the shared pipe."""
        os.write(self._pipe, MESSAGE.pack(self._post.rank, op, self._post.incarnation, sequence))

    def receive(self) -> Reply:
        """Sleep until the answer is there, and take it."""
        while not self.answered:
            os.eventfd_read(self._doorbell)
        return super().receive()

    def _center_has_a_queue(self) -> bool:
        waiting = struct.unpack("i", fcntl.ioctl(self._pipe, termios.FIONREAD, b"\0\0\0\0"))[0]
        return int(waiting) > 0


def warm_learner(job: Job, device: str) -> Learner:
    """A worker's learner, ready for its first step."""
    seed_everything(job.plan.seed)
    learner = job.make_learner(device)
    if isinstance(learner, WarmsUp):
        learner.warm_up(example(job.train, job.plan))
    return learner


def _train(post: Post, job: Job) -> None:
    if is_shared(post.layout):
        seat = Seat(post.rank, post.workers, post.window, post.reader.open())
        job = changed(job, train=open_source(job, Segment(post.segment.open(), post.layout), seat))
    exchange = Posted(post, job, warm_learner(job, post.device))
    exchange.say(Op.READY)
    drive(job, exchange, incarnation=post.incarnation)
    exchange.say(Op.LEFT)


def drive(job: Job, exchange: Exchange, *, incarnation: int) -> None:
    """Run the worker's loop to its end, each of its requests answered by the exchange."""
    loop = work(job.scheme, exchange.me, incarnation=incarnation, distances=job.distances)
    answer: Answer = None
    try:
        request = next(loop)
        while True:
            answer = exchange.answer(request)
            request = loop.send(answer)
    except StopIteration:
        exchange.check()


def _evaluate(post: Post, job: Job) -> None:
    learner = job.make_learner(post.device)
    reader = Reader(Segment(post.segment.open(), post.layout), aliased=job.scheme.aliased)
    assert job.validation is not None
    while True:
        os.eventfd_read(post.doorbell.open())
        clock = reader.pull(learner.weights, learner.buffers, learner.integers)
        began = time.monotonic()
        found = learner.evaluate(job.validation, job.evaluation_batch)
        note(post.notes.open(), {"clock": clock, "found": found, "seconds": time.monotonic() - began})
