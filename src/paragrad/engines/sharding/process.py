"""The process of a shard: serves a slice of the center. Workers upload their slices of commits and fetch those of their
replies; the center's process decides which commits make an update, and when it counts."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paragrad.codecs.codec import Codec
from paragrad.core.job import Job
from paragrad.data.memory import available
from paragrad.engines.process.task import Report
from paragrad.engines.sharding import slice_file
from paragrad.engines.sharding.slice import Slice
from paragrad.engines.transport import transport
from paragrad.engines.transport.header import CODED, decoded, rooms_for, whole_number
from paragrad.engines.transport.message import PROTOCOL, Malformed, Refused, TransportError, Vectors, declared
from paragrad.engines.transport.transport import Header, Listener
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.optimizer import OptimizerLike
from paragrad.schemes.scheme import Scheme


@dataclass(frozen=True)
class ServesShard:
    """The role of a shard's process: serves a slice until it is ended."""

    index: int
    start_id: str
    """Identifies one start of the center."""
    directory: Path
    addresses: tuple[str, ...]
    """Where to listen: at the address of an earlier process, if there was one and that is free, else at the last."""
    token: str
    certificate: tuple[bytes, bytes] | None

    def __call__(self, job: Job, report: Report) -> None:
        optimizer = job.center_optimizer(job.make_learner("cpu")) if job.scheme.ships == "gradient" else None
        assert isinstance(optimizer, CenterOptimizer | None)
        chosen = None if optimizer is None else optimizer.chosen
        service = ShardService(job.scheme, self.directory, self.index, self.start_id, chosen, job.codec)
        listener = self._listen(service)
        report("listening", listener.port)
        while True:
            signal.pause()

    def _listen(self, service: ShardService) -> Listener:
        for address in self.addresses:
            try:
                return transport.default().listen(service, address, self.token, self.certificate)
            except TransportError:
                if address == self.addresses[-1]:
                    raise
        raise AssertionError


@dataclass
class Upload:
    """Where one worker's slices of commits arrive."""

    ticket: int = 0
    """Counts them: only the latest counts, a thread that still reads an earlier one stops."""
    filling: threading.Lock = field(default_factory=threading.Lock)
    """Held while bytes are put there."""


class ShardService:
    """What the network's threads do. ``lock`` guards the slice; bytes are filled in without it."""

    def __init__(
        self,
        scheme: Scheme,
        directory: Path,
        index: int,
        start_id: str,
        optimizer: OptimizerLike | None = None,
        codec: Codec | None = None,
    ) -> None:
        """``optimizer``: what the center steps with, where it does."""
        self.scheme = scheme
        self.codec = None if codec is None else codec.of_slices
        self.start_id = start_id
        self.lock = threading.Lock()
        self.held: Slice | None = None
        """None: it has not been filled yet."""
        self.uploads: dict[int, Upload] = {}
        self.ended = threading.Event()
        """The run is over."""
        self._directory = directory
        self._index = index
        self._path: Path | None = None
        self.serve(start_id, optimizer)

    def serve(self, start_id: str, optimizer: OptimizerLike | None = None) -> None:
        """From here on it belongs to this start_id of the center; what an earlier process has left for it is taken over."""
        self.start_id, self.held, self._optimizer = start_id, None, optimizer
        left = slice_file.left_by(self._directory, self._index, start_id)
        if left is not None:
            self.make(left.workers, left.length, left.dtype, lambda held: held.take_over(left.segment))
            left.segment.close()

    def make(self, workers: int, length: int, dtype: torch.dtype, fill: Callable[[Slice], None]) -> None:
        """A slice in memory of its own; what was there before it is given up once it is filled."""
        sizes = {"workers": workers, "length": length}
        held, path = slice_file.make(self._directory, self.scheme, self._optimizer, dtype=dtype, **sizes)
        fill(held)
        slice_file.publish(self._directory, self._index, self.start_id, held, path)
        self.discard()
        self.held, self._path = held, path

    def discard(self) -> None:
        """The memory is needed no longer: the run is over, or there is other."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def slice_of(self, header: Header) -> Slice:
        """The slice, for who knows of this start_id of the center."""
        if header.get("start_id") != self.start_id:
            raise Refused("gone: the center was started again, so join again.")
        if self.held is None:
            raise Refused("gone: this shard has not been filled yet.")
        return self.held

    # -- what the center says -------------------------------------------------------------------------------

    def ask(self, name: str, header: Header, peer: str) -> Header:
        """``prepare`` an update, ``flip`` to it, ``hand`` a worker the value; ``end``."""
        if header.get("protocol") != PROTOCOL:
            raise Malformed(f"Protocol {str(header.get('protocol'))[:20]!r}, but this shard speaks {PROTOCOL}.")
        with self.lock:
            held = self.slice_of(header)
            if name == "end":
                self.ended.set()
                return {}
            acts = {"prepare": held.prepare, "flip": held.flip, "hand": held.hand}
            if name not in acts:
                raise Malformed(f"{name[:40]!r} is no question that a shard answers.")
            return acts[name](header)

    def exchange(self, peer: str) -> PendingExchange:
        """``put``, ``fetch`` and ``pull`` of a worker, ``load`` and ``gather`` of the center."""
        return PendingExchange(self)

    def heartbeat(self, header: Header, peer: str) -> Iterator[Header]:
        """Refuse: workers send their heartbeats to the center."""
        raise Refused("A shard takes no heartbeats: send them to the center.")

    def rejected(self, peer: str, why: str) -> None:
        """Write it into the log."""
        print(f"Rejected {peer or 'a client'}: {why[:300]}")


class PendingExchange:
    """One exchange, of a worker or of the center."""

    def __init__(self, service: ShardService) -> None:
        self._service = service
        self._ticket = 0
        self._upload = Upload()
        self._rooms: dict[str, torch.Tensor] = {}
        self._coded: dict[str, torch.Tensor] = {}

    def begin(self, header: Header) -> Vectors:
        """Who it is, what is wanted, and where the vectors go."""
        service, op = self._service, header.get("op")
        if op not in ("put", "fetch", "pull", "load", "gather"):
            raise Malformed(f"{str(op)[:20]!r} is nothing that an exchange with a shard can be.")
        if op == "load":
            if header.get("start_id") != service.start_id:
                raise Refused("gone: this shard is another center's.")
            said = declared(header)
            size = sum(length * dtype.itemsize for dtype, length in said.values())
            if "value" not in said or size > available():
                raise Malformed(f"A slice of {size:,} bytes cannot be: this shard's machine has {available():,} left.")
            self._rooms = {name: torch.empty(length, dtype=dtype) for name, (dtype, length) in said.items()}
        elif op == "put":
            with service.lock:
                held = service.slice_of(header)
                worker = _rank(header, held)
                self._rooms = held.room(worker, whole_number(header, "incarnation", 0), whole_number(header, "sequence", 0))
                self._upload = service.uploads.setdefault(worker, Upload())
            with self._upload.filling:
                self._upload.ticket += 1
                self._ticket = self._upload.ticket
            if service.codec is not None:
                self._coded = rooms_for(header, service.codec, self._rooms["value"].numel())
                return {CODED + name: tensor for name, tensor in self._coded.items()}
        return self._rooms

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Around every piece: not once the same worker has begun to lay down another."""
        with self._upload.filling:
            self._check_ticket()
            yield

    def _check_ticket(self) -> None:
        if self._upload.ticket != self._ticket:
            raise Refused("gone: a later exchange of the same worker has begun.")

    def finish(self, header: Header) -> tuple[Header, Vectors]:
        """What has come counts from here on; what was asked for."""
        service, op = self._service, header["op"]
        if service.codec is not None and self._coded:
            # Beside its place first: if it came before, what lies there may be read.
            room = self._rooms["value"]
            found = decoded(service.codec, self._coded, room)
            with self.filling():
                room.copy_(found)
        with service.lock:
            if op == "load":
                self._load(header)
                return {}, {}
            held = service.slice_of(header)
            if op == "put":
                self._check_ticket()
                held.stage(_rank(header, held), whole_number(header, "incarnation", 0), whole_number(header, "sequence", 0))
                return {}, {}
            if op == "fetch":
                return {}, {"value": held.answer(_rank(header, held), whole_number(header, "version", 0))}
            if op == "pull":
                value = held.center.copy_of(whole_number(header, "clock", 0))
                return ({"passed": True}, {}) if value is None else ({}, {"value": value})
            tensors = held.tensors(whole_number(header, "clock", 0))
            return {}, {name: tensors[name] for name in header["names"]}

    def _load(self, header: Header) -> None:
        value = self._rooms["value"]
        self._service.make(
            len(header["ledger"]),
            value.numel(),
            value.dtype,
            lambda held: held.load(self._rooms, header["clock"], header["ledger"], header["versions"]),
        )


def _rank(header: Header, held: Slice) -> int:
    rank = header.get("rank")
    if not isinstance(rank, int) or not 0 <= rank < held.center.workers:
        raise Malformed(f"Worker {str(rank)[:20]!r} is unknown: this run has workers 0 to {held.center.workers - 1}.")
    return rank
