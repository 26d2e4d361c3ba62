"""Where workers from elsewhere are received: who sits where, and what becomes of what they send. Its threads never touch the
center: they lay a commit out in a slot and say so in the pipe, as a worker of this machine does, and wait for its answer."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paragrad.center import Center
from paragrad.codecs.codec import Codec
from paragrad.engines.exchanging import Exchanging
from paragrad.engines.guests import Guest
from paragrad.engines.localworker import Reader
from paragrad.engines.memory import boot
from paragrad.engines.shared import Segment, plain_layout
from paragrad.engines.slot import MESSAGE, Op, Slot
from paragrad.job import Job
from paragrad.transport.message import PROTOCOL, Malformed, Refused

BEAT = 1.0
"""Seconds between two signs of life."""
KINDS = 64
"""Reasons for which somebody was turned away that are counted apart."""


class Reception:
    """What the network's threads do. ``lock`` guards the guests; slots are their worker's, or the center's, as ever."""

    def __init__(
        self,
        job: Job,
        center: Center,
        segment: Segment,
        slots: list[Slot],
        mouth: int,
        waker: int,
        *,
        about: dict[str, Any],
        layout: dict[str, Any],
        data: str,
        run: str,
        shares: str | None,
        window: int,
        reserved: int = 0,
    ) -> None:
        self.guests: list[Guest | None] = [None] * center.workers
        self.incarnations = [-1] * center.workers
        """The last that each place has had."""
        self.lock = threading.Lock()
        self.turned_away: dict[str, int] = {}
        """How often somebody was, by the reason."""
        self.news: list[tuple[str, dict[str, Any]]] = []
        """Events for the record, which is not this room's."""
        self.failures: list[tuple[Guest, str]] = []
        """Exceptions of workers, as text."""
        self.queue: dict[str, float] = {}
        """Workers for whom there was no place, by their keys, and when they asked: they ask again."""
        self.stopping: str | None = None
        self.answered = threading.Condition(self.lock)
        """An answer lies in a slot, or the run is over."""
        self.job = job
        self.center = center
        self._segment = segment
        self.slots = slots
        self._mouth = mouth
        self._waker = waker
        self._about = about
        self._layout = layout
        self._fingerprint = data
        self._run = run
        self._shares = shares
        self.window = window
        self._reserved = reserved
        """The first places are for workers that the center starts itself."""
        self.shards: list[tuple[int, int, str]] = []
        """From where to where those go that hold the rest of the center, and their addresses."""
        self.announced: dict[int, str | None] = {}
        """The shards that are started by hand, and where each was last heard of."""
        self.closed = False
        """Whether newcomers wait until the center is whole."""
        self.reader = Reader(segment)
        self.rooms: dict[int, torch.Tensor] = {}
        self.wants_residuals = False
        """Workers bring along what a codec has left out of their commits."""
        self.brought: dict[int, tuple[int, torch.Tensor | None]] = {}
        """What they have brought, and with which commit; None: they know nothing of it."""
        self.handed: dict[int, torch.Tensor | None] = {}
        """What newcomers are given of it; None: it still lies where they are."""
        self.life = os.urandom(8).hex()
        """Changes when the center is started again."""

    @property
    def codec(self) -> Codec | None:
        """What decodes the values that come here: all of them, or the first slice."""
        codec = self.job.codec
        return codec.of_slices if codec is not None and self.shards else codec

    # -- short questions ------------------------------------------------------------------------------------

    def ask(self, name: str, head: dict[str, Any], peer: str) -> dict[str, Any]:
        """``about``: what is trained here. ``join``: a place. ``leave``: it is free again. ``last``: of a worker's commits, the
        last that counts, where the run was stopped; else 0."""
        if head.get("protocol") != PROTOCOL:
            raise Malformed(
                f"Protocol {str(head.get('protocol'))[:20]!r}, but this center speaks {PROTOCOL}: use the same version of "
                "paragrad on both sides."
            )
        if name == "about":
            return {**self._about, "protocol": PROTOCOL, "life": self.life}
        if name == "shard":
            return self._hear_of_shard(head)
        if name == "join":
            return self._join(head, peer)
        if name == "last":
            with self.lock:
                guest = self.guest_of(head)
                return {"last": self.center.last(guest.rank) if self.stopping not in (None, "finished") else 0}
        if name == "leave":
            with self.lock:
                guest = self.guest_of(head)
                if self.stopping is not None:
                    guest.told = True
                elif head.get("early") is True:
                    guest.lost_at = -math.inf  # it will not come back, so nobody waits for it
                    self._wake()
                elif (failure := head.get("failure")) is not None:
                    self.failures.append((guest, str(failure)))
                    guest.lost_at = guest.lost_at or time.monotonic()
                    self._wake()
                else:
                    guest.finished = True
                    self.say_to_center(guest, Op.LEFT)
            return {}
        raise Malformed(f"{name[:40]!r} is no question that a center answers.")

    def _join(self, head: dict[str, Any], peer: str) -> dict[str, Any]:
        self._check_sameness(head)
        key = head.get("key")
        if not isinstance(key, str) or len(key) < 8:
            raise Malformed("A worker that joins has no key of its own.")
        shared = self._shares is not None and head.get("boot") == boot() and head.get("uid") == os.getuid()
        shared = shared and head.get("shared") is True
        with self.lock:
            self.queue.pop(key, None)
            if self.stopping is not None:
                return {"stop": self.stopping}
            if self.closed and head.get("back") is True:
                raise Refused("The center waits for its shards.")
            if self.closed:
                return {"full": len(self.guests)}
            guest = self._same(head.get("was"), key)
            if guest is None and head.get("back") is True:
                return {"gone": True}
            rank = self._free_place(key, head.get("rank")) if guest is None else guest.rank
            if rank is None:
                self.queue[key] = time.monotonic()
                return {"full": len(self.guests)}
            guest = guest or self._seated(rank, key)
            pid = head.get("pid")
            guest.where, guest.pid = str(head.get("host", ""))[:200] or peer, pid if isinstance(pid, int) else 0
            guest.machine, guest.shared = str(head.get("boot", "")), shared
            guest.seen, guest.lost_at, guest.silent = time.monotonic(), None, False
            if guest.said == 0 and not guest.ready:
                guest.said = -1 - guest.incarnation
                self.news.append(("worker", {**guest.named, "pid": guest.pid}))
            told = {
                "rank": rank,
                "incarnation": guest.incarnation,
                "life": self.life,
                "run": self._run,
                "workers": len(self.guests),
                "window": self.window,
                "answers": bool(self.center.answers),
                "beat": BEAT,
                "shards": self.shards,
            }
            if guest.shared:
                told |= {"file": self._shares, "layout": plain_layout(self._segment.layout)}
            return told

    def _hear_of_shard(self, head: dict[str, Any]) -> dict[str, Any]:
        """A shard that was started by hand says where it is, again and again."""
        index, address = head.get("index"), str(head.get("address"))
        with self.lock:
            if not isinstance(index, int) or index not in self.announced:
                wanted = ", ".join(map(str, self.announced)) or "none"
                raise Malformed(f"Shard {str(index)[:20]!r} is not awaited here; these are: {wanted}.")
            self.announced[index] = address
        return {"life": self.life}

    def _check_sameness(self, head: dict[str, Any]) -> None:
        """A worker that trains something else must not come in."""
        if head.get("layout") != self._layout:
            raise Malformed(
                f"The worker's model is {_told(head.get('layout'))}, the center's {_told(self._layout)}. Every worker must "
                "build the same model."
            )
        if head.get("data") != self._fingerprint:
            raise Malformed(
                f"The worker's rows are others than the center's (fingerprint {str(head.get('data'))[:20]}, not "
                f"{self._fingerprint}). Give every worker the same data."
            )

    def _same(self, was: Any, key: str) -> Guest | None:
        """Who was away for a moment, and whose place is still its own."""
        if not isinstance(was, list) or len(was) != 2 or was[0] not in range(len(self.guests)):
            return None
        guest = self.guests[was[0]]
        if guest is None or guest.key != key or guest.incarnation != was[1] or guest.given_up or guest.finished:
            return None
        return guest

    def _free_place(self, key: str, wanted: Any) -> int | None:
        """One that nobody has had, or else one whose worker is lost."""
        free = [rank for rank, guest in enumerate(self.guests) if guest is None]
        free += [rank for rank, guest in enumerate(self.guests) if guest is not None and self._is_left(guest, key)]
        return next((rank for rank in free if (rank >= self._reserved if wanted is None else rank == wanted)), None)

    def _is_left(self, guest: Guest, key: str) -> bool:
        """Whether a guest's place is another's to take."""
        if guest.lost_at is None:
            return False
        if guest.key == key:
            return True
        # One that is stopped, or whose line broke, may be in the middle of writing to memory that is shared with it.
        return not guest.shared or not (guest.stays or _maps(guest.pid, self._shares))

    def _seated(self, rank: int, key: str) -> Guest:
        """A newcomer on a place; what was still coming in from its predecessor is not wanted any more."""
        self.incarnations[rank] += 1
        before = self.guests[rank]
        if before is not None:
            before.take_ticket()
        guest = self.guests[rank] = Guest(rank, self.incarnations[rank], key)
        return guest

    # -- exchanges ------------------------------------------------------------------------------------------

    def exchange(self, peer: str) -> Exchanging:
        """A commit, or a wish for an answer or for the center as it is."""
        return Exchanging(self)

    def stay(self, head: dict[str, Any], peer: str, gone: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """A worker that is there, for as long as the connection holds."""
        with self.lock:
            guest = self.guest_of(head)
            guest.stays += 1
        over = False
        try:
            while True:
                with self.lock:
                    guest.seen = time.monotonic()
                    if guest.silent and not guest.given_up:
                        guest.silent, guest.lost_at = False, None
                    if self.guests[guest.rank] is not guest or guest.given_up:
                        answer: dict[str, Any] = {"gone": True}
                    elif self.stopping is not None:
                        answer, over = {"stop": self.stopping}, True
                    else:
                        answer = {"neighbours": self._neighbours(guest)}
                yield answer
        finally:
            with self.lock:
                guest.stays -= 1
                guest.told = guest.told or over  # it has hung up since
                if not guest.stays and not guest.finished and guest.lost_at is None and not guest.told:
                    guest.lost_at = time.monotonic()
                    self.news.append(("away", {**guest.named, "reason": "its connection ended"}))

    def _neighbours(self, guest: Guest) -> int:
        """Workers on the same machine: they share its cores."""
        return sum(g is not None and g.machine == guest.machine and g.lost_at is None for g in self.guests) or 1

    def intruder(self, peer: str, why: str) -> None:
        """Somebody was turned away: once in a while is said, all are counted."""
        with self.lock:
            kind = why.split(":")[0].split(",")[0][:60]
            kind = kind if kind in self.turned_away or len(self.turned_away) < KINDS else "other"
            self.turned_away[kind] = count = self.turned_away.get(kind, 0) + 1
            if count & (count - 1) == 0:
                self.news.append(("turned_away", {"peer": peer, "why": why[:300], "count": count}))

    def announce(self, rank: int) -> None:
        """An answer lies in a slot."""
        with self.answered:
            self.answered.notify_all()

    def stop(self, reason: str) -> None:
        """The run is over: all who ask are told so."""
        with self.answered:
            self.stopping = reason
            self.answered.notify_all()

    # -- for exchanges --------------------------------------------------------------------------------------

    def guest_of(self, head: dict[str, Any]) -> Guest:
        """Whose message it is; raises where that one has no place here."""
        rank, incarnation = head.get("rank"), head.get("incarnation")
        if not isinstance(rank, int) or not 0 <= rank < len(self.guests):
            raise Malformed(f"Worker {str(rank)[:20]!r} is unknown: this run has workers 0 to {len(self.guests) - 1}.")
        if head.get("life") != self.life:
            raise Refused("gone: the center was started again, so join again.")
        guest = self.guests[rank]
        if guest is None or guest.incarnation != incarnation or guest.given_up:
            raise Refused("gone: the worker was given up, and its place is another's: join again.")
        return guest

    def say_to_center(self, guest: Guest, op: Op, sequence: int = 0) -> None:
        """A message for the center; not once it stops, when the pipe's number may soon be another file's."""
        assert self.stopping is None
        os.write(self._mouth, MESSAGE.pack(guest.rank, op, guest.incarnation, sequence))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # who has that much to read is awake
            os.write(self._waker, b"\0")


def _maps(pid: int, path: str | None) -> bool:
    """Whether a process of this machine has the center's memory before it."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            return path is not None and any(path in line for line in maps)
    except OSError:
        return False


def _told(layout: Any) -> str:
    if not isinstance(layout, dict):
        return "none"
    return f"{layout.get('parameters')} parameters of {layout.get('dtype')} ({layout.get('names')})"
