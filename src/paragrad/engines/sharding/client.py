"""A worker's side of a sharded center: a commit goes to all shards in parallel, slice by slice, and so does its reply."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from paragrad.codecs.codec import Codec, size
from paragrad.core import kernels
from paragrad.engines.exchange.worker import ReadsCenter
from paragrad.engines.transport.connection import Connection, Placement, deadline
from paragrad.engines.transport.header import CODED
from paragrad.engines.transport.message import Malformed, Refused, TransportError, Vectors
from paragrad.engines.transport.transport import Channel, Header
from paragrad.types import Vector

PATIENCE = 300.0
"""Seconds that a worker waits for a shard while the center can be reached."""


class ShardClients:
    """A connection to each shard. A failed call is repeated, at the address of the shard that the center reports then."""

    def __init__(self, connection: Connection, placement: Placement, pool: ThreadPoolExecutor, codec: Codec | None) -> None:
        self._connection = connection
        self._pool = pool
        self._codec = codec
        self._channels: dict[str, Channel] = {}
        self._first = placement.shards[0][0]

    @property
    def placement(self) -> Placement:
        """The worker's present placement."""
        assert self._connection.placement is not None
        return self._connection.placement

    def first(self, vectors: Vectors) -> dict[str, torch.Tensor]:
        """Return what goes to the center's own process: the first slice, and the vectors that are not sharded."""
        whole = {name: vector for name, vector in vectors.items() if not is_sharded(name)}
        return cut(vectors, 0, self._first, self._codec) | whole

    def first_as_nan(self, vectors: Vectors) -> dict[str, torch.Tensor]:
        """Return the same for a commit that is not finite: the center rejects it by its first slice, and no shard gets any."""
        return as_nan(self.first(vectors), self._first, self._codec)

    def size(self, vectors: Vectors) -> int:
        """Return the number of bytes that go to the shards."""
        return sum(size(cut(vectors, lo, hi, self._codec)) for lo, hi, _ in self.placement.shards)

    def put(self, vectors: Vectors, sequence: int) -> str:
        """Upload a commit to all shards; return the ``start_id`` of the center that they belong to."""

        def act(channel: Channel, sender: Header, lo: int, hi: int) -> None:
            mine = cut(vectors, lo, hi, self._codec)
            header = {"op": "put", "sequence": sequence, **sender}
            channel.exchange(header, mine, lambda back: {}, timeout=deadline(mine))

        return self._everywhere(act)

    def fetch(self, answer: Vector, version: int) -> None:
        """Read the slices of a reply from all shards."""

        def act(channel: Channel, sender: Header, lo: int, hi: int) -> None:
            mine = {"value": answer[lo:hi]}
            channel.exchange({"op": "fetch", "version": version, **sender}, {}, lambda back: mine, timeout=deadline(mine))

        self._everywhere(act)

    def pull(self, value: Vector, clock: int) -> bool:
        """Read the center's slices at a clock from all shards; return False if one of them no longer has it."""
        passed: list[int] = []

        def act(channel: Channel, sender: Header, lo: int, hi: int) -> None:
            mine = {"value": value[lo:hi]}

            def into(back: Header) -> Vectors:
                if "passed" in back:
                    passed.append(lo)
                    return {}
                return mine

            channel.exchange({"op": "pull", "clock": clock, **sender}, {}, into, timeout=deadline(mine))

        self._everywhere(act)
        return not passed

    def _everywhere(self, act: Callable[[Channel, Header, int, int], None]) -> str:
        """Do the same at every shard in parallel. Repeat failed calls; after a restart of the center, repeat all of them."""
        until, pause, reported = time.monotonic() + PATIENCE, 0.05, False
        placement = self.placement
        left = set(range(len(placement.shards)))
        while True:
            calls: dict[int, Future[None]] = {}
            for k in left:
                lo, hi, address = placement.shards[k]
                if address not in self._channels:
                    self._channels[address] = self._connection.channel_to(address)
                calls[k] = self._pool.submit(act, self._channels[address], placement.sender, lo, hi)
            failure: Exception | None = None
            for k, call in calls.items():
                try:
                    call.result()
                    left.discard(k)
                except Malformed:
                    raise
                except (TransportError, Refused) as error:
                    failure = error
            if failure is None:
                return placement.start_id
            if time.monotonic() > until:
                raise TransportError(f"{failure} This worker waited for the shards for {PATIENCE:.0f} seconds.")
            time.sleep(pause)
            pause = min(1.0, 2 * pause)
            if pause == 1.0 and not reported:
                reported = True
                self._connection.say(f"{failure} This worker tries again.")
            found = self._connection.find_shards()
            if found.start_id != placement.start_id:
                left = set(range(len(found.shards)))
            placement = found


class ShardedReader:
    """Reads a sharded center between exchanges: all slices at one clock, or again."""

    def __init__(self, first: ReadsCenter, shards: ShardClients) -> None:
        self._first = first
        self._shards = shards

    @property
    def live_value(self) -> Vector:
        """Private memory: a sharded center shares none."""
        return self._first.live_value

    def pull(self, value: Vector) -> int:
        """Copy the center into ``value``; return its clock."""
        while True:
            clock = self._first.pull(self._shards.first({"value": value})["value"])
            if self._shards.pull(value, clock):
                return clock


def is_sharded(name: str) -> bool:
    """Return whether the vector of this name is cut into slices."""
    return name == "value" or name.startswith(("also.", CODED))


def cut(vectors: Vectors, lo: int, hi: int, codec: Codec | None = None) -> dict[str, torch.Tensor]:
    """Return a slice of the vectors of a commit that are sharded."""
    mine = {name: vector[lo:hi] for name, vector in vectors.items() if is_sharded(name) and not name.startswith(CODED)}
    coded = {name.removeprefix(CODED): tensor for name, tensor in vectors.items() if name.startswith(CODED)}
    if codec is None or not coded:
        return mine
    return mine | {CODED + name: tensor for name, tensor in codec.cut(coded, lo, hi).items()}


def as_nan(vectors: Vectors, length: int, codec: Codec | None = None) -> dict[str, torch.Tensor]:
    """Return the vectors of a first slice with a value of this length that is NaN."""
    nan = torch.full((length,), math.nan)
    if codec is None:
        return {**vectors, "value": nan.to(vectors["value"].dtype)}
    return {**vectors, **{CODED + name: tensor for name, tensor in codec.of_slices.encode(nan).items()}}


def is_finite(vectors: Vectors) -> bool:
    """Return whether all vectors of a commit that are sharded are finite."""
    return all(kernels.finite(vector) for name, vector in vectors.items() if is_sharded(name))
