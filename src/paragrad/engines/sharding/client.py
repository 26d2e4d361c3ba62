"""A worker's side of a center that is spread: a commit goes to all shards at once, slice by slice, an answer comes so."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from paragrad.codecs.codec import Codec, size
from paragrad.core import kernels
from paragrad.engines.exchange.worker import ReadsCenter
from paragrad.engines.transport.connection import DEADLINE, Connection, Placement
from paragrad.engines.transport.header import CODED
from paragrad.engines.transport.message import Malformed, Refused, TransportError, Vectors, weight
from paragrad.engines.transport.transport import Channel
from paragrad.types import Vector

PATIENCE = 300.0
"""Seconds that a shard is waited for while the center is there."""


class ShardClients:
    """A connection to each shard; what breaks is tried again, where the center says that the shard is by then."""

    def __init__(self, connection: Connection, placement: Placement, pool: ThreadPoolExecutor, codec: Codec | None) -> None:
        self._connection = connection
        self._pool = pool
        self._codec = codec
        self._clients: dict[str, Channel] = {}
        self._first = placement.shards[0][0]

    def first(self, vectors: Vectors) -> dict[str, torch.Tensor]:
        """What goes to the center itself: the first slice, and what is not cut."""
        others = {name: vector for name, vector in vectors.items() if not is_spread(name)}
        return cut(vectors, 0, self._first, self._codec) | others

    def spoiled(self, vectors: Vectors) -> dict[str, torch.Tensor]:
        """The same of a commit that is not finite anywhere: the center refuses it for its first slice, and no shard sees
        anything of it."""
        return spoiled(self.first(vectors), self._first, self._codec)

    def weight(self, vectors: Vectors) -> int:
        """Bytes that go to the shards."""
        return sum(size(cut(vectors, lo, hi, self._codec)) for lo, hi, _ in self._placement().shards)

    def put(self, vectors: Vectors, sequence: int) -> str:
        """Lay a commit down at all shards; returns the start_id of the center that they belong to."""

        def act(client: Channel, me: Mapping[str, Any], lo: int, hi: int) -> None:
            mine = cut(vectors, lo, hi, self._codec)
            header = {"op": "put", "sequence": sequence, **me}
            client.exchange(header, mine, lambda back: {}, timeout=_deadline(mine))

        return self._everywhere(act)

    def fetch(self, answer: Vector, version: int) -> None:
        """Take the answer's slices from all shards."""

        def act(client: Channel, me: Mapping[str, Any], lo: int, hi: int) -> None:
            mine = {"value": answer[lo:hi]}
            client.exchange({"op": "fetch", "version": version, **me}, {}, lambda back: mine, timeout=_deadline(mine))

        self._everywhere(act)

    def pull(self, value: Vector, clock: int) -> bool:
        """Take the center's slices of that clock from all shards; False where one has gone on from it."""
        passed: list[int] = []

        def act(client: Channel, me: Mapping[str, Any], lo: int, hi: int) -> None:
            def into(back: dict[str, Any]) -> Vectors:
                if "passed" in back:
                    passed.append(lo)
                    return {}
                return {"value": value[lo:hi]}

            client.exchange({"op": "pull", "clock": clock, **me}, {}, into, timeout=_deadline({"value": value[lo:hi]}))

        self._everywhere(act)
        return not passed

    def _everywhere(self, act: Callable[[Channel, Mapping[str, Any], int, int], None]) -> str:
        """The same at every shard, at once, again where one does not answer; all of it again where the center is another."""
        until, pause, said = time.monotonic() + PATIENCE, 0.05, False
        placement = self._placement()
        left = set(range(len(placement.shards)))
        while True:
            flights = {k: self._submit(act, placement, k) for k in left}
            trouble: Exception | None = None
            for k, flight in flights.items():
                try:
                    flight.result()
                    left.discard(k)
                except Malformed:
                    raise
                except (TransportError, Refused) as error:
                    trouble = error
            if trouble is None:
                return placement.start_id
            if time.monotonic() > until:
                raise TransportError(f"{trouble} The shards were waited for {PATIENCE:.0f} seconds.")
            time.sleep(pause)
            pause = min(1.0, 2 * pause)
            if pause == 1.0 and not said:
                said = True
                self._connection.say(f"{trouble} This worker tries again.")
            found = self._connection.find_again()
            if found.start_id != placement.start_id:
                left = set(range(len(found.shards)))
            placement = found

    def _submit(
        self, act: Callable[[Channel, Mapping[str, Any], int, int], None], placement: Placement, k: int
    ) -> Future[None]:
        lo, hi, address = placement.shards[k]
        if address not in self._clients:
            self._clients[address] = self._connection.channel_to(address)
        return self._pool.submit(act, self._clients[address], placement.sender, lo, hi)

    @property
    def start_id(self) -> str:
        """Of the center, as it is now."""
        return self._placement().start_id

    def _placement(self) -> Placement:
        assert self._connection.placement is not None
        return self._connection.placement


class ShardedReader:
    """A center that is spread, as it is read between exchanges: all slices of one clock, or again."""

    def __init__(self, first: ReadsCenter, slices: ShardClients) -> None:
        self._first = first
        self._slices = slices

    @property
    def live_value(self) -> Vector:
        """Of one's own: nobody shares memory here."""
        return self._first.live_value

    def pull(self, value: Vector) -> int:
        """Copy the center into ``value``; returns its clock."""
        while True:
            mine = self._slices.first({"value": value})["value"]
            clock = self._first.pull(mine)
            if self._slices.pull(value, clock):
                return clock


def is_spread(name: str) -> bool:
    """Whether a vector of that name is cut."""
    return name == "value" or name.startswith(("also.", CODED))


def cut(vectors: Vectors, lo: int, hi: int, codec: Codec | None = None) -> dict[str, torch.Tensor]:
    """A slice of what is cut of a commit."""
    mine = {name: vector[lo:hi] for name, vector in vectors.items() if is_spread(name) and not name.startswith(CODED)}
    coded = {name.removeprefix(CODED): tensor for name, tensor in vectors.items() if name.startswith(CODED)}
    if codec is None or not coded:
        return mine
    return mine | {CODED + name: tensor for name, tensor in codec.cut(coded, lo, hi).items()}


def spoiled(vectors: Vectors, first: int, codec: Codec | None = None) -> dict[str, torch.Tensor]:
    """A first slice, of so many elements, that is not finite anywhere."""
    nothing = torch.full((first,), math.nan)
    if codec is None:
        return {**vectors, "value": nothing.to(vectors["value"].dtype)}
    return {**vectors, **{CODED + name: tensor for name, tensor in codec.of_slices.encode(nothing).items()}}


def is_sound(vectors: Vectors) -> bool:
    """Whether what is cut of a commit is finite."""
    return all(kernels.finite(vector) for name, vector in vectors.items() if is_spread(name))


def _deadline(vectors: Vectors) -> float:
    return DEADLINE + 2 * weight(vectors) / 1e6
