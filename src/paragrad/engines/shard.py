"""The process of a shard: serves a slice of the center. Workers lay their slices of commits down and fetch those of their
answers; the center's process says which commits make an update, and when it holds."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paragrad.codecs.codec import Codec
from paragrad.data.memory import available
from paragrad.engines import slicememory
from paragrad.engines.heads import CODED, decoded, rooms_for, whole_number
from paragrad.engines.localworker import Post, guarded, note
from paragrad.engines.slice import Slice
from paragrad.job import Job
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.optimizer import OptimizerLike
from paragrad.schemes.scheme import Scheme
from paragrad.transport.message import PROTOCOL, Malformed, Refused, TransportError, Vectors, declared


@dataclass(frozen=True)
class ShardPost(Post):
    """What the process of a shard is handed, besides."""

    index: int = 0
    life: str = ""
    """Of the center: it is another one when that was started again."""
    addresses: tuple[str, ...] = ()
    """Where to listen: where an earlier process did, if there was one and that is free, else at the last."""
    pair: tuple[bytes, bytes] | None = None


def shard_main(post: ShardPost) -> None:
    """Serve until ended."""
    guarded(post, _serve)


def _serve(post: Post, job: Job) -> None:
    from paragrad.transport.flight import Server

    assert isinstance(post, ShardPost)
    assert post.line is not None
    optimizer = job.center_optimizer(job.make_learner("cpu")) if job.scheme.ships == "gradient" else None
    assert isinstance(optimizer, CenterOptimizer | None)
    chosen = None if optimizer is None else optimizer.chosen
    keeper = Keeper(job.scheme, post.line.directory, post.index, post.life, chosen, job.codec)
    *wished, other = post.addresses
    try:
        server = Server.listen(keeper, next(iter(wished), other), post.line.token, post.pair)
    except TransportError:
        if not wished:
            raise
        server = Server.listen(keeper, other, post.line.token, post.pair)
    note(post.notes.open(), {"listening": server.port, "loaded": keeper.held is not None})
    while True:
        signal.pause()


@dataclass
class Desk:
    """Where one worker lays down its commits."""

    ticket: int = 0
    """Counts them: only the latest counts, a thread that still reads an earlier one stops."""
    filling: threading.Lock = field(default_factory=threading.Lock)
    """Held while bytes are put there."""


class Keeper:
    """What the network's threads do. ``lock`` guards the slice; bytes are filled in without it."""

    def __init__(
        self,
        scheme: Scheme,
        directory: Path,
        index: int,
        life: str,
        optimizer: OptimizerLike | None = None,
        codec: Codec | None = None,
    ) -> None:
        """``optimizer``: what the center steps with, where it does."""
        self.scheme = scheme
        self.codec = None if codec is None else codec.of_slices
        self.life = life
        self.lock = threading.Lock()
        self.held: Slice | None = None
        """None: it has not been filled yet."""
        self.desks: dict[int, Desk] = {}
        self.ended = threading.Event()
        """The run is over."""
        self._directory = directory
        self._index = index
        self._path: Path | None = None
        self.live(life, optimizer)

    def live(self, life: str, optimizer: OptimizerLike | None = None) -> None:
        """From here on it belongs to this life of the center; what an earlier process has left for it is taken over."""
        self.life, self.held, self._optimizer = life, None, optimizer
        left = slicememory.left_by(self._directory, self._index, life)
        if left is not None:
            self.make(left.workers, left.length, left.dtype, lambda held: held.take_over(left.segment))
            left.segment.close()

    def make(self, workers: int, length: int, dtype: torch.dtype, fill: Callable[[Slice], None]) -> None:
        """A slice in memory of its own; what was there before it is given up once it is filled."""
        sizes = {"workers": workers, "length": length}
        held, path = slicememory.make(self._directory, self.scheme, self._optimizer, dtype=dtype, **sizes)
        fill(held)
        slicememory.publish(self._directory, self._index, self.life, held, path)
        self.discard()
        self.held, self._path = held, path

    def discard(self) -> None:
        """The memory is needed no longer: the run is over, or there is other."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def slice_of(self, head: dict[str, Any]) -> Slice:
        """The slice, for who knows of this life of the center."""
        if head.get("life") != self.life:
            raise Refused("gone: the center was started again, so join again.")
        if self.held is None:
            raise Refused("gone: this shard has not been filled yet.")
        return self.held

    # -- what the center says -------------------------------------------------------------------------------

    def ask(self, name: str, head: dict[str, Any], peer: str) -> dict[str, Any]:
        """``prepare`` an update, ``flip`` to it, ``hand`` a worker the value; ``end``."""
        if head.get("protocol") != PROTOCOL:
            raise Malformed(f"Protocol {str(head.get('protocol'))[:20]!r}, but this shard speaks {PROTOCOL}.")
        with self.lock:
            held = self.slice_of(head)
            if name == "end":
                self.ended.set()
                return {}
            acts = {"prepare": held.prepare, "flip": held.flip, "hand": held.hand}
            if name not in acts:
                raise Malformed(f"{name[:40]!r} is no question that a shard answers.")
            return acts[name](head)

    def exchange(self, peer: str) -> Exchanging:
        """``put``, ``fetch`` and ``pull`` of a worker, ``load`` and ``gather`` of the center."""
        return Exchanging(self)

    def stay(self, head: dict[str, Any], peer: str, gone: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """Workers say to the center that they are there."""
        raise Refused("A shard does not look after workers: say so to the center.")

    def intruder(self, peer: str, why: str) -> None:
        """Into the log."""
        print(f"Turned away {peer or 'a client'}: {why[:300]}")


class Exchanging:
    """One exchange, of a worker or of the center."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._ticket = 0
        self._desk = Desk()
        self._rooms: dict[str, torch.Tensor] = {}
        self._coded: dict[str, torch.Tensor] = {}

    def begin(self, head: dict[str, Any]) -> Vectors:
        """Who it is, what is wanted, and where the vectors go."""
        keeper, op = self._keeper, head.get("op")
        if op not in ("put", "fetch", "pull", "load", "gather"):
            raise Malformed(f"{str(op)[:20]!r} is nothing that an exchange with a shard can be.")
        if op == "load":
            if head.get("life") != keeper.life:
                raise Refused("gone: this shard is another center's.")
            said = declared(head)
            size = sum(length * dtype.itemsize for dtype, length in said.values())
            if "value" not in said or size > available():
                raise Malformed(f"A slice of {size:,} bytes cannot be: this shard's machine has {available():,} left.")
            self._rooms = {name: torch.empty(length, dtype=dtype) for name, (dtype, length) in said.items()}
        elif op == "put":
            with keeper.lock:
                held = keeper.slice_of(head)
                worker = _rank(head, held)
                self._rooms = held.room(worker, whole_number(head, "incarnation", 0), whole_number(head, "sequence", 0))
                self._desk = keeper.desks.setdefault(worker, Desk())
            with self._desk.filling:
                self._desk.ticket += 1
                self._ticket = self._desk.ticket
            if keeper.codec is not None:
                self._coded = rooms_for(head, keeper.codec, self._rooms["value"].numel())
                return {CODED + name: tensor for name, tensor in self._coded.items()}
        return self._rooms

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Around every piece: not once the same worker has begun to lay down another."""
        with self._desk.filling:
            self._check_ticket()
            yield

    def _check_ticket(self) -> None:
        if self._desk.ticket != self._ticket:
            raise Refused("gone: a later exchange of the same worker has begun.")

    def finish(self, head: dict[str, Any]) -> tuple[dict[str, Any], Vectors]:
        """What has come counts from here on; what was asked for."""
        keeper, op = self._keeper, head["op"]
        if keeper.codec is not None and self._coded:
            # Beside its place first: if it came before, what lies there may be read.
            room = self._rooms["value"]
            found = decoded(keeper.codec, self._coded, room)
            with self.filling():
                room.copy_(found)
        with keeper.lock:
            if op == "load":
                self._load(head)
                return {}, {}
            held = keeper.slice_of(head)
            if op == "put":
                self._check_ticket()
                held.stage(_rank(head, held), whole_number(head, "incarnation", 0), whole_number(head, "sequence", 0))
                return {}, {}
            if op == "fetch":
                return {}, {"value": held.answer(_rank(head, held), whole_number(head, "version", 0))}
            if op == "pull":
                value = held.center.copy_of(whole_number(head, "clock", 0))
                return ({"passed": True}, {}) if value is None else ({}, {"value": value})
            tensors = held.tensors(whole_number(head, "clock", 0))
            return {}, {name: tensors[name] for name in head["names"]}

    def _load(self, head: dict[str, Any]) -> None:
        value = self._rooms["value"]
        self._keeper.make(
            len(head["ledger"]),
            value.numel(),
            value.dtype,
            lambda held: held.load(self._rooms, head["clock"], head["ledger"], head["versions"]),
        )


def _rank(head: dict[str, Any], held: Slice) -> int:
    rank = head.get("rank")
    if not isinstance(rank, int) or not 0 <= rank < held.center.workers:
        raise Malformed(f"Worker {str(rank)[:20]!r} is unknown: this run has workers 0 to {held.center.workers - 1}.")
    return rank
