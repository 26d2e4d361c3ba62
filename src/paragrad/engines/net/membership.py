"""Which workers have joined over a network, and what they send. The transport's threads never touch the center: they put a
commit into a slot and announce it in the pipe, as a worker of this machine does, and wait for its reply."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from paragrad.codecs.codec import Codec
from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.engines.exchange.slot import MESSAGE, Op, Slot, most
from paragrad.engines.exchange.worker import CenterReader
from paragrad.engines.net.member import Member
from paragrad.engines.net.request import PendingExchange
from paragrad.engines.process.mapped_file import boot
from paragrad.engines.process.segment import Segment, plain_layout
from paragrad.engines.transport.message import PROTOCOL, Malformed, Refused
from paragrad.engines.transport.transport import Header
from paragrad.types import WorkerState

BEAT = 1.0
"""Seconds between two heartbeats."""
KINDS = 64
"""Reasons for a rejection that are counted apart."""
FENCED: Header = {"fenced": True}
"""The answer to a worker whose rank has a later incarnation: it ends."""


class Membership:
    """The service that workers reach over a network. ``lock`` guards the members; a slot is its worker's, or the center's."""

    def __init__(
        self,
        job: Job,
        center: Center,
        segment: Segment,
        slots: list[Slot],
        message_end: int,
        wake_end: int,
        *,
        about: dict[str, Any],
        layout: dict[str, Any],
        data: str,
        run: str,
        shares: str | None,
        window: int,
    ) -> None:
        """``about``: what is trained. ``layout``, ``data``: what a worker's model and rows must be. ``shares``: the file of the
        center's memory, where workers on this machine may map it."""
        self.members: list[Member | None] = [None] * center.workers
        self.incarnations = [-1] * center.workers
        """The last number that was given out for each rank: to a worker that joined, or to one that was started."""
        self.started: dict[int, int] = {}
        """Ranks that are reserved for workers which the center starts, and the incarnation that may join."""
        self.lock = threading.Lock()
        self.rejections: dict[str, int] = {}
        """Number of rejected clients by reason."""
        self.news: list[tuple[str, dict[str, Any]]] = []
        """Events for the record, which the center's thread writes."""
        self.failures: list[tuple[Member, dict[str, Any]]] = []
        """Exceptions of workers: the ``text``, and the ``usage`` error, if it was one."""
        self.queue: dict[str, float] = {}
        """Workers for which there was no rank, by their keys, and when they asked: they ask again."""
        self.stopping: str | None = None
        """Why the run is over; None while it goes on."""
        self.answered = threading.Condition(self.lock)
        """Notified when a reply is in a slot, or the run is over."""
        self.job = job
        self.center = center
        self._segment = segment
        self.slots = slots
        self._message_end = message_end
        self._wake_end = wake_end
        self._about = about
        self._layout = layout
        self._fingerprint = data
        self._run = run
        self._shares = shares
        self.window = window
        self.most = most(job, slots[0].value.numel(), window)
        """Largest length of each list of a commit."""
        self.shards: list[tuple[int, int, str]] = []
        """First and last value, and address, of each shard that holds the rest of the center."""
        self.announced: dict[int, str | None] = {}
        """Shards that are started by hand, and the last known address of each."""
        self.closed = False
        """Whether newcomers wait until the center is complete."""
        self.reader = CenterReader(segment)
        self.rooms: dict[int, torch.Tensor] = {}
        self.wants_more = False
        """Whether workers bring their private state, and what a codec has left out of their commits."""
        self.states: dict[int, tuple[int, WorkerState]] = {}
        """Private states that workers have brought, and the commit they belong to."""
        self.brought: dict[int, tuple[int, torch.Tensor | None]] = {}
        """Residuals that workers have brought, and the commit they belong to; None: the worker has none."""
        self.handed: dict[int, torch.Tensor | None] = {}
        """Residuals that newcomers are given; None: theirs is still on their machine."""
        self.start_id = os.urandom(8).hex()
        """Identifies this start of the center; a restarted one has another."""

    @property
    def codec(self) -> Codec | None:
        """Decodes the values that arrive here: all of them, or the first slice."""
        codec = self.job.codec
        return codec.of_slices if codec is not None and self.shards else codec

    # -- workers that the center starts ---------------------------------------------------------------------

    def reserve(self, rank: int) -> int:
        """Reserve a rank for a worker that is about to be started; return its incarnation. Earlier ones are fenced off."""
        with self.lock:
            self.incarnations[rank] += 1
            self.started[rank] = self.incarnations[rank]
            return self.incarnations[rank]

    # -- short questions ------------------------------------------------------------------------------------

    def ask(self, name: str, header: Header, peer: str) -> Header:
        """Answer ``about``, ``join``, ``leave``, ``warn``, ``last`` (the last commit that counts of a run that was stopped) and
        ``shard``."""
        if header.get("protocol") != PROTOCOL:
            raise Malformed(
                f"Protocol {str(header.get('protocol'))[:20]!r}, but this center uses {PROTOCOL}: install the same version of "
                "paragrad on both sides."
            )
        match name:
            case "about":
                return {**self._about, "protocol": PROTOCOL, "start_id": self.start_id}
            case "shard":
                return self._announce_shard(header)
            case "join":
                return self._join(header, peer)
            case "leave":
                return self._leave(header)
            case "warn":
                with self.lock:
                    member = self.member_of(header)
                    text = str(header.get("message"))[:1000]
                    self.news.append(("warning", {"message": f"Worker {member.rank} on {member.where}: {text}"}))
                return {}
            case "last":
                with self.lock:
                    member = self.member_of(header)
                    return {"last": self.center.last(member.rank) if self.stopping not in (None, "finished") else 0}
        raise Malformed(f"Unknown question {name[:40]!r}.")

    def _leave(self, header: Header) -> Header:
        with self.lock:
            member = self.member_of(header)
            if self.stopping is not None:
                member.knows_end = True
            elif header.get("early") is True:
                member.lost_at = -math.inf  # it will not come back, so nobody waits for it
                self._wake()
            elif (failure := header.get("failure")) is not None:
                usage = header.get("usage")
                self.failures.append((member, {"text": str(failure), "usage": None if usage is None else str(usage)}))
                member.lost_at = member.lost_at or time.monotonic()
                self._wake()
            else:
                member.finished = True
                self.announce_to_center(member, Op.LEFT)
        return {}

    def _join(self, header: Header, peer: str) -> Header:
        self._check_sameness(header)
        key = header.get("key")
        if not isinstance(key, str) or len(key) < 8:
            raise Malformed("A worker that joins has no key of its own.")
        shared = self._shares is not None and header.get("boot") == boot() and header.get("uid") == os.getuid()
        shared = shared and header.get("shared") is True
        with self.lock:
            self.queue.pop(key, None)
            if self.stopping is not None:
                return {"stop": self.stopping}
            if self.closed and header.get("back") is True:
                raise Refused("The center waits for its shards.")
            if self.closed:
                return {"full": len(self.members)}
            found = self._find_rank(header, key)
            if not isinstance(found, Member):
                return found
            member = found
            pid = header.get("pid")
            member.where, member.pid = str(header.get("host", ""))[:200] or peer, pid if isinstance(pid, int) else 0
            member.machine, member.shared = str(header.get("boot", "")), shared
            member.seen, member.lost_at, member.silent = time.monotonic(), None, False
            if member.said == 0 and not member.ready:
                member.said = -1 - member.incarnation
                self.news.append(("worker", {**member.named, "pid": member.pid}))
            told = {
                "rank": member.rank,
                "incarnation": member.incarnation,
                "start_id": self.start_id,
                "run": self._run,
                "workers": len(self.members),
                "window": self.window,
                "answers": bool(self.center.answers),
                "beat": BEAT,
                "shards": self.shards,
            }
            if member.shared:
                told |= {"file": self._shares, "layout": plain_layout(self._segment.layout)}
            return told

    def _find_rank(self, header: Header, key: str) -> Member | Header:
        """Return the member that a worker is, or becomes; or what it is told instead."""
        number = header.get("number")
        if number is not None:
            return self._find_started(number, key)
        member = self._same(header.get("was"), key)
        if member is not None:
            return member
        if header.get("back") is True:
            return {"gone": True}
        rank = self._free_rank(key)
        if rank is None:
            self.queue[key] = time.monotonic()
            return {"full": len(self.members)}
        self.incarnations[rank] += 1
        return self._seat(rank, self.incarnations[rank], key)

    def _find_started(self, number: Any, key: str) -> Member | Header:
        """The same for a worker that was started with a rank and an incarnation."""
        match number:
            case [int(rank), int(incarnation)] if rank in self.started:
                pass
            case _:
                raise Malformed(f"Worker {str(number)[:40]!r} was not started by this center.")
        if incarnation != self.started[rank]:
            return FENCED
        before = self.members[rank]
        if before is not None and before.incarnation == incarnation:
            if before.key != key or before.finished:
                return FENCED
            # It was away for a moment. Where it was given up meanwhile, another one will be started in its place.
            return FENCED if before.given_up else before
        if before is not None and before.incarnation < incarnation and self._may_write(before):
            return {"full": len(self.members)}  # its predecessor is fenced off, and ends
        return self._seat(rank, incarnation, key)

    def _announce_shard(self, header: Header) -> Header:
        """Note where a shard that was started by hand is; it says so again and again."""
        index, address = header.get("index"), str(header.get("address"))
        with self.lock:
            if not isinstance(index, int) or index not in self.announced:
                wanted = ", ".join(map(str, self.announced)) or "none"
                raise Malformed(f"Shard {str(index)[:20]!r} is not expected here. Expected: {wanted}.")
            self.announced[index] = address
        return {"start_id": self.start_id}

    def _check_sameness(self, header: Header) -> None:
        """Reject a worker with another model or data set."""
        if header.get("layout") != self._layout:
            raise Malformed(
                f"The worker's model is {_told(header.get('layout'))}, the center's {_told(self._layout)}. Every worker must "
                "build the same model."
            )
        if header.get("data") != self._fingerprint:
            raise Malformed(
                f"The worker's rows differ from the center's (fingerprint {str(header.get('data'))[:20]}, not "
                f"{self._fingerprint}). Give every worker the same data."
            )

    def _same(self, was: Any, key: str) -> Member | None:
        """Return the member that a worker was before it reconnected, where its rank was not reassigned."""
        if not isinstance(was, list) or len(was) != 2 or was[0] not in range(len(self.members)):
            return None
        member = self.members[was[0]]
        if member is None or member.key != key or member.incarnation != was[1] or member.given_up or member.finished:
            return None
        return member

    def _free_rank(self, key: str) -> int | None:
        """Return a rank that no worker has had, or else one whose worker is lost."""
        ranks = [rank for rank in range(len(self.members)) if rank not in self.started]
        free = [rank for rank in ranks if self.members[rank] is None]
        free += [rank for rank in ranks if (member := self.members[rank]) is not None and self._is_free(member, key)]
        return free[0] if free else None

    def _is_free(self, member: Member, key: str) -> bool:
        """Return whether another worker may take a member's rank."""
        return member.lost_at is not None and (member.key == key or not self._may_write(member))

    def _may_write(self, member: Member) -> bool:
        """Return whether a member, even a lost one, may be in the middle of writing to memory that is shared with it."""
        return member.shared and (member.heartbeats > 0 or _maps(member.pid, self._shares))

    def _seat(self, rank: int, incarnation: int, key: str) -> Member:
        """Give a rank to a newcomer; what its predecessor still sends is not wanted any more."""
        before = self.members[rank]
        if before is not None:
            before.take_ticket()
        member = self.members[rank] = Member(rank, incarnation, key)
        return member

    # -- exchanges ------------------------------------------------------------------------------------------

    def exchange(self, peer: str) -> PendingExchange:
        """Begin an exchange: a commit, or a request for a reply or for the center as it is."""
        return PendingExchange(self)

    def heartbeat(self, header: Header, peer: str) -> Iterator[Header]:
        """Answer a worker's heartbeats, for as long as the connection holds."""
        with self.lock:
            member = self.member_of(header)
            member.heartbeats += 1
        over = False
        try:
            while True:
                with self.lock:
                    member.seen = time.monotonic()
                    if member.silent and not member.given_up:
                        member.silent, member.lost_at = False, None
                    if self._is_fenced(member.rank, member.incarnation):
                        answer = FENCED
                    elif self.members[member.rank] is not member or member.given_up:
                        answer = {"gone": True}
                    elif self.stopping is not None:
                        answer, over = {"stop": self.stopping}, True
                    else:
                        answer = {"neighbours": self._neighbours(member)}
                yield answer
        finally:
            with self.lock:
                member.heartbeats -= 1
                member.knows_end = member.knows_end or over  # it has hung up since
                alone = not member.heartbeats and not member.finished and not member.knows_end
                if alone and member.lost_at is None:
                    member.lost_at = time.monotonic()
                    self.news.append(("away", {**member.named, "reason": "its connection ended"}))

    def _neighbours(self, member: Member) -> int:
        """Return the number of workers on the same machine: they share its cores."""
        return sum(m is not None and m.machine == member.machine and m.lost_at is None for m in self.members) or 1

    def rejected(self, peer: str, why: str) -> None:
        """Count a rejected client; the first, second, fourth, eighth ... of a kind is reported."""
        with self.lock:
            kind = why.split(":")[0].split(",")[0][:60]
            kind = kind if kind in self.rejections or len(self.rejections) < KINDS else "other"
            self.rejections[kind] = count = self.rejections.get(kind, 0) + 1
            if count & (count - 1) == 0:
                self.news.append(("rejected", {"peer": peer, "why": why[:300], "count": count}))

    def announce(self, rank: int) -> None:
        """Wake the exchanges that wait: a reply is in a slot."""
        with self.answered:
            self.answered.notify_all()

    def stop(self, reason: str) -> None:
        """End the run: all who ask are told so."""
        with self.answered:
            self.stopping = reason
            self.answered.notify_all()

    # -- for exchanges --------------------------------------------------------------------------------------

    def member_of(self, header: Header) -> Member:
        """Return the sender of a message; raise where it has no rank here."""
        rank, incarnation = header.get("rank"), header.get("incarnation")
        if not isinstance(rank, int) or not 0 <= rank < len(self.members):
            raise Malformed(f"Worker {str(rank)[:20]!r} is unknown: this run has workers 0 to {len(self.members) - 1}.")
        if header.get("start_id") != self.start_id:
            raise Refused("gone: the center was restarted, so join again.")
        if isinstance(incarnation, int) and self._is_fenced(rank, incarnation):
            raise Refused("fenced: this worker was taken for dead and replaced.")
        member = self.members[rank]
        if member is None or member.incarnation != incarnation or member.given_up:
            raise Refused("gone: the worker was given up, and its rank may be another's: join again.")
        return member

    def _is_fenced(self, rank: int, incarnation: int) -> bool:
        """Return whether a worker that the center started has been replaced by a later one."""
        return rank in self.started and incarnation < self.started[rank]

    def announce_to_center(self, member: Member, op: Op, sequence: int = 0) -> None:
        """Write a message for the center; not once it stops, when the pipe's number may soon be another file's."""
        assert self.stopping is None
        os.write(self._message_end, MESSAGE.pack(member.rank, op, member.incarnation, sequence))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # with that much to read it is awake
            os.write(self._wake_end, b"\0")


def _maps(pid: int, path: str | None) -> bool:
    """Return whether a process of this machine maps the center's memory."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            return path is not None and any(path in line for line in maps)
    except OSError:
        return False


def _told(layout: Any) -> str:
    if not isinstance(layout, dict):
        return "none"
    return f"{layout.get('parameters')} parameters of {layout.get('dtype')} ({layout.get('names')})"
