"""The process of a shard, which serves a slice of the center. Workers upload their slices of commits and fetch those of their
replies; the center's process decides which commits make an update, and when it becomes valid."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
from paragrad.engines.transport.uploads import Uploads
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.optimizer import OptimizerLike
from paragrad.schemes.scheme import Scheme


@dataclass(frozen=True)
class ServesShard:
    """The role of a shard's process: serves a slice until it is killed."""

    index: int
    start_id: str
    """Identifies one start of the center."""
    directory: Path
    addresses: tuple[str, ...]
    """Addresses to listen at, of which the first free one is taken: that of an earlier process, then any port."""
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
        *preferred, last = self.addresses
        wire = transport.default()
        for address in preferred:
            with contextlib.suppress(TransportError):
                return wire.listen(service, address, self.token, self.certificate)
        return wire.listen(service, last, self.token, self.certificate)


class ShardService:
    """Answers workers and the center, in the transport's threads. ``lock`` guards the slice; uploads are written without it."""

    def __init__(
        self,
        scheme: Scheme,
        directory: Path,
        index: int,
        start_id: str,
        optimizer: OptimizerLike | None = None,
        codec: Codec | None = None,
    ) -> None:
        """``optimizer``: that of the center, if it has one."""
        self.scheme = scheme
        self.codec = None if codec is None else codec.of_slices
        self.start_id = start_id
        self.lock = threading.Lock()
        self.held: Slice | None = None
        """The slice; None until it is filled."""
        self.uploads: dict[int, Uploads] = {}
        """Uploads of each worker."""
        self.ended = threading.Event()
        """Set when the run is over."""
        self._directory = directory
        self._index = index
        self._path: Path | None = None
        self.serve(start_id, optimizer)

    def serve(self, start_id: str, optimizer: OptimizerLike | None = None) -> None:
        """Serve this start of the center; take over the slice that an earlier process has left for it."""
        self.start_id, self.held, self._optimizer = start_id, None, optimizer
        left = slice_file.left_by(self._directory, self._index, start_id)
        if left is not None:
            self.make(left.workers, left.length, left.dtype, lambda held: held.take_over(left.segment))
            left.segment.close()

    def make(self, workers: int, length: int, dtype: torch.dtype, fill: Callable[[Slice], None]) -> None:
        """Make a slice in new memory; the earlier one is removed once it is filled."""
        held, path = slice_file.make(self._directory, self.scheme, self._optimizer, workers=workers, length=length, dtype=dtype)
        fill(held)
        slice_file.publish(self._directory, self._index, self.start_id, held, path)
        self.discard()
        self.held, self._path = held, path

    def discard(self) -> None:
        """Remove the slice's memory: the run is over, or there is another slice."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def slice_of(self, header: Header) -> Slice:
        """Return the slice; raise ``Refused`` if the sender belongs to another start of the center."""
        if header.get("start_id") != self.start_id:
            raise Refused("gone: the center was restarted, so join again.")
        if self.held is None:
            raise Refused("gone: this shard has not been filled yet.")
        return self.held

    def ask(self, name: str, header: Header, peer: str) -> Header:
        """Answer the center: ``prepare`` an update, ``flip`` to it, ``hand`` a worker the value; ``end``."""
        if header.get("protocol") != PROTOCOL:
            raise Malformed(f"Protocol {str(header.get('protocol'))[:20]!r}, but this shard uses {PROTOCOL}.")
        with self.lock:
            held = self.slice_of(header)
            if name == "end":
                self.ended.set()
                return {}
            acts = {"prepare": held.prepare, "flip": held.flip, "hand": held.hand}
            if name not in acts:
                raise Malformed(f"Unknown question {name[:40]!r} to a shard.")
            return acts[name](header)

    def exchange(self, peer: str) -> PendingExchange:
        """Begin ``put``, ``fetch`` or ``pull`` of a worker, ``load`` or ``gather`` of the center."""
        return PendingExchange(self)

    def heartbeat(self, header: Header, peer: str) -> Iterator[Header]:
        """Refuse: workers send their heartbeats to the center."""
        raise Refused("A shard takes no heartbeats: send them to the center.")

    def rejected(self, peer: str, why: str) -> None:
        """Write the reason into the log."""
        print(f"Rejected {peer or 'a client'}: {why[:300]}")


class PendingExchange:
    """One exchange, of a worker or of the center."""

    def __init__(self, service: ShardService) -> None:
        self._service = service
        self._uploads = Uploads()
        self._upload = 0
        self._rooms: dict[str, torch.Tensor] = {}
        self._coded: dict[str, torch.Tensor] = {}

    def begin(self, header: Header) -> Vectors:
        """Check the sender and the operation; return the memory that the vectors go into."""
        service, op = self._service, header.get("op")
        if op not in ("put", "fetch", "pull", "load", "gather"):
            raise Malformed(f"Unknown operation {str(op)[:20]!r} of an exchange with a shard.")
        if op == "load":
            if header.get("start_id") != service.start_id:
                raise Refused("gone: this shard belongs to another center.")
            kinds = declared(header)
            size = sum(length * dtype.itemsize for dtype, length in kinds.values())
            if "value" not in kinds or size > available():
                raise Malformed(
                    f"A slice of {size:,} bytes cannot be loaded: it needs a value, and this machine has {available():,} free."
                )
            self._rooms = {name: torch.empty(length, dtype=dtype) for name, (dtype, length) in kinds.items()}
        elif op == "put":
            with service.lock:
                held = service.slice_of(header)
                rank, incarnation, sequence = _commit_of(header, held)
                self._rooms = held.room(rank, incarnation, sequence)
                self._uploads = service.uploads.setdefault(rank, Uploads())
            self._upload = self._uploads.begin()
            if service.codec is not None:
                self._coded = rooms_for(header, service.codec, self._rooms["value"].numel())
                return {CODED + name: tensor for name, tensor in self._coded.items()}
        return self._rooms

    def filling(self) -> AbstractContextManager[None]:
        """Guard the writing of one piece; raise ``Refused`` if a later upload of the same worker has begun."""
        return self._uploads.write(self._upload)

    def finish(self, header: Header) -> tuple[Header, Vectors]:
        """Make an upload count, or return the vectors that were asked for."""
        service, op = self._service, header["op"]
        if service.codec is not None and self._coded:
            # Decoded outside the stage: if the same commit came before, an update may be reading it.
            value = decoded(service.codec, self._coded, self._rooms["value"])
            with self.filling():
                self._rooms["value"].copy_(value)
        with service.lock:
            if op == "load":
                self._load(header)
                return {}, {}
            held = service.slice_of(header)
            if op == "put":
                self._uploads.check(self._upload)
                held.stage(*_commit_of(header, held))
                return {}, {}
            if op == "fetch":
                return {}, {"value": held.answer(_rank(header, held), whole_number(header, "version", 0))}
            if op == "pull":
                copy = held.center.copy_of(whole_number(header, "clock", 0))
                return ({"passed": True}, {}) if copy is None else ({}, {"value": copy})
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


def _commit_of(header: Header, held: Slice) -> tuple[int, int, int]:
    """Return rank, incarnation and sequence of a commit."""
    return _rank(header, held), whole_number(header, "incarnation", 0), whole_number(header, "sequence", 0)
