"""A worker that has joined a center over a network: its exchanges go over a connection, or through memory that it maps."""

from __future__ import annotations

import os
import sys
import traceback
import zlib
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paragrad.core.job import Job
from paragrad.core.state import private
from paragrad.data.load import fingerprint
from paragrad.data.source import Reporting
from paragrad.engines.exchange.slot import Slot, most
from paragrad.engines.exchange.worker import CenterReader, Exchange, ReadsCenter, drive, warm_learner
from paragrad.engines.net.residual_file import ResidualFile
from paragrad.engines.process.devices import usable_cores
from paragrad.engines.process.mapped_file import FAST
from paragrad.engines.process.segment import Segment
from paragrad.engines.process.task import Report
from paragrad.engines.sharding.client import ShardClients, ShardedReader, is_finite
from paragrad.engines.transport import header as headers
from paragrad.engines.transport.connection import Connection, Fenced, Placement, Replaced, RunEnded
from paragrad.engines.transport.endpoint import Endpoint
from paragrad.engines.transport.header import commit_vectors, flat, most_bytes, put_state, reply_vectors, rooms_for_state
from paragrad.engines.transport.message import Vectors
from paragrad.engines.transport.transport import Header
from paragrad.errors import UsageError
from paragrad.learners.learner import Learner
from paragrad.types import COMMIT, REPLY, Commit, Reply, Vector, WorkerState


@dataclass(frozen=True)
class NetworkWorker:
    """The role of a worker process that the center has started, on any machine: joins for its rank, trains to the end."""

    rank: int
    incarnation: int
    where: Path | Endpoint
    """The run directory, if this machine sees it, or the center's address."""
    token: str
    shared: bool
    device: str

    def __call__(self, job: Job, report: Report) -> None:
        number, say = (self.rank, self.incarnation), partial(print, flush=True)
        connection = Connection(self.where, self.token, shared=self.shared, number=number, say=say)
        learner = warm_learner(job, self.device)
        try:
            work_on(job, learner, connection, same_as(job, learner))
        except (RunEnded, Fenced) as ended:
            print(f"The worker ends: {ended}")
        except Exception as error:
            if not report.carries_errors:
                connection.leave(traceback.format_exc(), usage=str(error) if isinstance(error, UsageError) else None)
            raise
        finally:
            connection.close()


def same_as(job: Job, learner: Learner) -> dict[str, Any]:
    """Describe the model and the rows, which must be the same here as at the center."""
    module = getattr(learner, "module", None)
    named = [] if module is None else [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    layout = {
        "parameters": learner.weights.numel(),
        "dtype": str(learner.weights.dtype).removeprefix("torch."),
        "buffers": learner.buffers.numel(),
        "integers": learner.integers.numel(),
        "names": f"{zlib.crc32(repr(named).encode()):08x}",
    }
    return {"layout": layout, "data": fingerprint(job.train)}


def work_on(job: Job, learner: Learner, connection: Connection, same: dict[str, Any], *, shares_cores: bool = False) -> None:
    """Train until there are no rows left; a worker that was given up meanwhile joins again. ``shares_cores``: the workers on
    this machine divide its cores among them."""
    if isinstance(job.train, Reporting):
        job.train.report = connection.warn
    while True:
        placement = connection.join(same)
        residuals = None if job.codec is None else ResidualFile(learner.weights, placement.run, placement.rank)
        pool, keep = ThreadPoolExecutor(1 + len(placement.shards), "paragrad-exchange"), True
        try:
            exchange = _exchange_of(Joined(job, learner, connection, placement, residuals, pool))
            exchange.shares_cores = shares_cores
            drive(job, exchange, incarnation=placement.incarnation)
            connection.leave()
            keep = False
            return
        except Replaced:
            keep = False
        except Fenced:
            keep = False
            raise
        except RunEnded as ended:
            keep = residuals is not None and str(ended) != "finished" and not connection.bring_residual(residuals.after)
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # a worker that is interrupted does not wait for a reply
            if residuals is not None:
                residuals.close(keep=keep)


def _exchange_of(joined: Joined) -> NetworkExchange:
    if joined.placement.file is not None:
        try:
            return MappedExchange(joined)
        except FileNotFoundError:  # another container on the same machine
            joined = replace(joined, placement=joined.connection.unshare())
    return ShardedExchange(joined) if joined.placement.shards else WireExchange(joined)


@dataclass(frozen=True)
class Joined:
    """A worker that has joined, with all that its exchanges need."""

    job: Job
    learner: Learner
    connection: Connection
    placement: Placement
    residuals: ResidualFile | None
    """Residuals of the codec; None without one."""
    pool: ThreadPoolExecutor


class NetworkExchange(Exchange, ABC):
    """Exchanges that run in another thread, so that a window may be computed meanwhile."""

    def __init__(self, joined: Joined, slot: Slot, reader: ReadsCenter, answer: Vector | None) -> None:
        self._connection, self._residuals, self._pool = joined.connection, joined.residuals, joined.pool
        self._wanted = False
        """True if the center asks for residuals and private state, with the next commit."""
        self._commit: Commit | None = None
        self._given: Vector | None = None
        self._given_state: dict[str, torch.Tensor] | None = None
        self.shares_cores = False
        self._neighbours = 1
        sizes = {"workers": joined.placement.workers, "incarnation": joined.placement.incarnation}
        super().__init__(joined.job, joined.learner, slot, reader, answer=answer, home=None, **sizes)
        self._in_flight: Future[None] = self._pool.submit(self._exchange)

    def send(self, commit: Commit) -> None:
        """Write the commit into the slot, and send it."""
        super().send(commit)
        self._commit = commit
        if self._residuals is not None:
            self._residuals.sent(commit)
        self._in_flight = self._pool.submit(self._exchange)

    def receive(self) -> Reply:
        """Wait for the reply, and return it."""
        self._in_flight.result()
        if self.shares_cores and self._connection.neighbours != self._neighbours:
            self._neighbours = self._connection.neighbours
            torch.set_num_threads(max(1, usable_cores() // self._neighbours))
        reply = self._reply()
        if self._residuals is not None:
            self._residuals.answered(reply, self._commit)
        return reply

    def _reply(self) -> Reply:
        return super().receive()

    @abstractmethod
    def _exchange(self) -> None:
        """Make one exchange, up to its reply."""

    @property
    def is_state_wanted(self) -> bool:
        return self._wanted

    def bring(self, state: WorkerState) -> None:
        self._connection.bring_state(self._waiting_for, *put_state(state, self._most_bytes))

    def warn(self, message: str) -> None:
        self._connection.warn(message)

    @property
    def _most_bytes(self) -> int:
        weights = self._learner.weights
        return most_bytes(weights.numel(), weights.element_size())

    def _header(self) -> Header:
        if self._commit is not None:
            return {"op": "commit", **COMMIT.header(self._commit), **put_state(self._commit.state, self._most_bytes)[0]}
        return {"op": "begin"} if self._residuals is None else {"op": "begin", "kept": self._residuals.kept}

    def _private(self) -> dict[str, torch.Tensor]:
        """Return private state and residuals, if the center asks for them."""
        if self._commit is None:
            return {}
        _, vectors = put_state(self._commit.state, self._most_bytes)
        residual = self._commit.residual if self._wanted else None
        return vectors if residual is None else vectors | {"residual": residual}

    def _room_for_private(self, back: Header) -> dict[str, torch.Tensor]:
        """Return memory for the predecessor's private state and residual that a newcomer is given."""
        self._given_state = rooms_for_state(back, sys.maxsize)
        rooms = flat(self._given_state)
        if self._residuals is None or not any(name == "residual" for name, *_ in back.get("vectors", ())):
            return rooms
        self._given = torch.empty_like(self._residuals.rows[0])
        return rooms | {"residual": self._given}

    def _take_private(self, back: Header) -> Vector | None:
        """Return the residual that a newcomer continues from, which is in the reply or still here; None if it is unknown."""
        self._wanted = bool(back.get("wanted"))
        if self._residuals is None or self._commit is not None:
            return None
        return self._residuals.of(back["last"]) if back.get("keep") else self._given


class WireExchange(NetworkExchange):
    """Vectors go over the connection, from and into this worker's private memory."""

    def __init__(self, joined: Joined) -> None:
        like, window = joined.learner.weights, joined.placement.window
        slot = Slot.make(private, joined.placement.rank, joined.job, joined.learner, window=window)
        slot.residuals = [] if joined.residuals is None else joined.residuals.rows
        self._most = most(joined.job, like.numel(), window)
        self._back: Header = {}
        self._residual: Vector | None = None
        super().__init__(joined, slot, WireReader(joined.connection, torch.empty_like(like)), torch.empty_like(like))

    def _exchange(self) -> None:
        self._back = self._connection.exchange(self._header, self._vectors, self._room)
        self._residual = self._take_private(self._back)

    def _reply(self) -> Reply:
        """Make the reply from what came over the wire."""
        slot = self._slot
        assert self._answer is not None
        if slot.residuals and self._commit is None:
            slot.put_residual(self._residual)
        return Reply(
            value=self._answer,
            buffers=slot.reply_buffers,
            integers=slot.reply_integers,
            residual=slot.residuals[int(slot.residual_row[0])] if slot.residuals else None,
            state=self._given_state or None,
            **headers.read(REPLY, self._back, self._most),
        )

    def _vectors(self) -> Vectors:
        if self._commit is None:
            return {}
        return commit_vectors(self._slot, self._commit.value.numel(), self._commit.coded, self._private())

    def _room(self, back: Header) -> Vectors:
        """Return the memory that the vectors of a reply go into."""
        if "sequence" not in back:
            return {}
        assert self._answer is not None
        return reply_vectors(self._slot, self._answer, self._room_for_private(back))


class WireReader:
    """Reads the center over the connection."""

    def __init__(self, connection: Connection, live: Vector) -> None:
        self._connection = connection
        self.live_value = live

    def pull(self, value: Vector) -> int:
        """Copy the center into ``value``; return its clock."""

        def into(back: Header) -> Vectors:
            return {"value": value} if "clock" in back else {}

        return int(self._connection.exchange(lambda: {"op": "pull"}, dict, into)["clock"])


class ShardedExchange(WireExchange):
    """The center is sharded: each shard has its slice of every vector."""

    def __init__(self, joined: Joined) -> None:
        self._shards = ShardClients(joined.connection, joined.placement, joined.pool, joined.job.codec)
        self._is_finite = True
        super().__init__(joined)
        self._reader = ShardedReader(self._reader, self._shards)

    def _exchange(self) -> None:
        super()._exchange()
        assert self._answer is not None
        self._shards.fetch(self._answer, self._back["version"])

    def _header(self) -> Header:
        header = super()._header()
        if self._commit is None:
            return header
        vectors = super()._vectors()
        # With a codec, the slot has the value as it will be decoded.
        self._is_finite = is_finite({**vectors, "value": self._slot.value})
        if not self._is_finite:
            return {**header, "staged": self._shards.placement.start_id, "beside": 0}
        start_id = self._shards.put(vectors, self._commit.sequence)
        return {**header, "staged": start_id, "beside": self._shards.size(vectors)}

    def _vectors(self) -> Vectors:
        vectors = super()._vectors()
        return self._shards.first(vectors) if self._is_finite else self._shards.first_as_nan(vectors)

    def _room(self, back: Header) -> Vectors:
        return self._shards.first(super()._room(back))


class MappedExchange(NetworkExchange):
    """On the center's machine: vectors are in its memory, and only headers go over the connection."""

    def __init__(self, joined: Joined) -> None:
        self._placement, self._residuals = joined.placement, joined.residuals
        super().__init__(joined, *self._open(joined.job, joined.learner, joined.placement))

    def _open(self, job: Job, learner: Learner, placement: Placement) -> tuple[Slot, CenterReader, Vector | None]:
        assert placement.file is not None
        assert placement.layout is not None
        segment = Segment(_opened(Path(placement.file)), placement.layout)
        slot = Slot.make(lambda name, *_: segment.tensor(name), placement.rank, job, learner, window=placement.window)
        slot.residuals = [] if self._residuals is None else self._residuals.rows
        return slot, CenterReader(segment), segment.tensor(f"answer{placement.rank}") if placement.answers else None

    def _exchange(self) -> None:
        back = self._connection.exchange(self._moved_header, self._private, self._room_for_private)
        residual = self._take_private(back)
        self._slot.handed = self._given_state or None
        if self._residuals is not None and self._commit is None:
            self._slot.put_residual(residual)

    def _moved_header(self) -> Header:
        """Return the header; after a restart of the center, first map its new memory and write the commit there."""
        self._follow_center()
        return self._header()

    def send(self, commit: Commit) -> None:
        """Write the commit into the slot, and announce it."""
        self._follow_center()
        super().send(commit)

    def _follow_center(self) -> None:
        placement = self._connection.placement
        assert placement is not None
        if placement.start_id != self._placement.start_id:
            self._placement = placement
            self._slot, self._reader, self._answer = self._open(self._job, self._learner, placement)
            if self._commit is not None:
                self._slot.put_commit(self._commit)
            self.me.move(self._where_to_write())


def _opened(path: Path) -> int:
    """Open a center's memory: a file of this user, which no other may write to."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    status = os.fstat(fd)
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not path.name.endswith(".center"):
        os.close(fd)
        raise UsageError(f"{path} is not the memory of your own center (in {FAST} or the run directory): it is not opened.")
    return fd
