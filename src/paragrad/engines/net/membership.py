"""The workers that have joined over a network. The transport's threads never touch the center: they put a commit into a slot
and announce it in the pipe, as a worker of this machine does, and wait for its reply."""

from __future__ import annotations

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
from paragrad.engines.process.children import wake_by
from paragrad.engines.process.mapped_file import boot
from paragrad.engines.process.segment import Segment, plain_layout
from paragrad.engines.transport.message import PROTOCOL, Malformed, Refused
from paragrad.engines.transport.transport import Header
from paragrad.types import WorkerState

BEAT = 1.0
"""Seconds between two heartbeats."""
KINDS = 64
"""Largest number of reasons for a rejection that are counted separately."""
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
        """``about``: describes what is trained. ``layout``, ``data``: what a worker's model and rows must be. ``shares``: the
        file of the center's memory, if workers on this machine may map it."""
        self.members: list[Member | None] = [None] * center.workers
        self.incarnations = [-1] * center.workers
        """Last incarnation of each rank, whether its worker joined or was started."""
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
        """Time of the last request of each worker that waits for a rank, by its key."""
        self.stopping: str | None = None
        """Reason why the run is over; None while it goes on."""
        self.answered = threading.Condition(self.lock)
        """Notified when a reply is in a slot, or the run is over."""
        self.center = center
        self.slots = slots
        self.most = most(job, slots[0].value.numel(), window)
        """Largest length of each list of a commit."""
        self.shards: list[tuple[int, int, str]] = []
        """First and last value, and address, of each shard that holds the rest of the center."""
        self.announced: dict[int, str | None] = {}
        """Last known address of each shard that is started by hand."""
        self.closed = False
        """True while newcomers must wait, until all shards of the center are ready."""
        self.reader = CenterReader(segment)
        self.rooms: dict[int, torch.Tensor] = {}
        """Copies of the center that are being sent, by rank."""
        self.wants_private = False
        """True if workers must bring their private state and residuals."""
        self.states: dict[int, tuple[int, WorkerState]] = {}
        """Private states that workers have brought, and the commit they belong to."""
        self.brought: dict[int, tuple[int, torch.Tensor | None]] = {}
        """Residuals that workers have brought, and the commit they belong to; None: the worker has none."""
        self.handed: dict[int, torch.Tensor | None] = {}
        """Residuals that newcomers are given; None: theirs is still on their machine."""
        self.start_id = os.urandom(8).hex()
        """Identifies this start of the center; a restarted one has another."""
        self._codec = job.codec
        self._segment = segment
        self._message_end = message_end
        self._wake = wake_by(wake_end)
        self._about = about
        self._layout = layout
        self._fingerprint = data
        self.run = run
        self._shares = shares
        self._window = window

    @property
    def codec(self) -> Codec | None:
        """Decodes the values that arrive here: whole ones, or the first slice."""
        return self._codec.of_slices if self._codec is not None and self.shards else self._codec

    def reserve(self, rank: int) -> int:
        """Reserve a rank for a worker that is about to be started; return its incarnation. Earlier ones are fenced off."""
        with self.lock:
            self.incarnations[rank] += 1
            self.started[rank] = self.incarnations[rank]
            return self.incarnations[rank]

    # -- short questions ------------------------------------------------------------------------------------

    def ask(self, name: str, header: Header, peer: str) -> Header:
        """Answer ``about``, ``join``, ``leave``, ``warn``, ``shard`` and ``last`` (the last applied commit of a run that was
        stopped)."""
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
                    self.news.append(("warning", {"message": f"Worker {member.rank} on {member.host}: {text}"}))
                return {}
            case "last":
                with self.lock:
                    member = self.member_of(header)
                    return {"last": self.center.last(member.rank) if self.stopping not in (None, "finished") else 0}
        raise Malformed(f"Unknown question {name[:40]!r}.")

    def _announce_shard(self, header: Header) -> Header:
        """Note the address of a shard that was started by hand; it is announced again every second."""
        index, address = header.get("index"), str(header.get("address"))
        with self.lock:
            if not isinstance(index, int) or index not in self.announced:
                expected = ", ".join(map(str, self.announced)) or "none"
                raise Malformed(f"Shard {str(index)[:20]!r} is not expected here. Expected: {expected}.")
            self.announced[index] = address
        return {"start_id": self.start_id}

    def _leave(self, header: Header) -> Header:
        with self.lock:
            member = self.member_of(header)
            if self.stopping is not None:
                member.knows_end = True
            elif header.get("early") is True:
                member.lost_at = -math.inf  # it will not come back, so the others need not wait for it
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
            raise Malformed("A worker that joins must send a key of at least 8 characters.")
        shared = self._shares is not None and header.get("boot") == boot() and header.get("uid") == os.getuid()
        with self.lock:
            self.queue.pop(key, None)
            if self.stopping is not None:
                return {"stop": self.stopping}
            if self.closed and header.get("back") is True:
                raise Refused("The center waits for its shards.")
            if self.closed:
                return {"full": len(self.members)}
            member = self._find_rank(header, key)
            if not isinstance(member, Member):
                return member
            pid = header.get("pid")
            member.host, member.pid = str(header.get("host", ""))[:200] or peer, pid if isinstance(pid, int) else 0
            member.machine, member.shared = str(header.get("boot", "")), shared and header.get("shared") is True
            member.heard_at, member.lost_at, member.silent = time.monotonic(), None, False
            if member.sequence == 0 and not member.ready:
                member.sequence = -1 - member.incarnation
                self.news.append(("worker", {**member.identity, "pid": member.pid}))
            answer = {
                "rank": member.rank,
                "incarnation": member.incarnation,
                "start_id": self.start_id,
                "run": self.run,
                "workers": len(self.members),
                "window": self._window,
                "answers": bool(self.center.answers),
                "beat": BEAT,
                "shards": self.shards,
            }
            if member.shared:
                answer |= {"file": self._shares, "layout": plain_layout(self._segment.layout)}
            return answer

    def _check_sameness(self, header: Header) -> None:
        if header.get("layout") != self._layout:
            raise Malformed(
                f"The worker's model has {_describe(header.get('layout'))}, the center's {_describe(self._layout)}. Every "
                "worker must build the same model."
            )
        if header.get("data") != self._fingerprint:
            raise Malformed(
                f"The worker's rows differ from the center's (fingerprint {str(header.get('data'))[:20]}, not "
                f"{self._fingerprint}). Give every worker the same data."
            )

    # -- ranks ----------------------------------------------------------------------------------------------

    def _find_rank(self, header: Header, key: str) -> Member | Header:
        """Return the member that a worker is, or becomes; without a rank for it, the answer to send instead."""
        if (number := header.get("number")) is not None:
            return self._find_started(number, key)
        member = self._find_reconnecting(header.get("was"), key)
        if member is not None:
            return member
        if header.get("back") is True:
            return {"gone": True}
        rank = self._free_rank(key)
        if rank is None:
            self.queue[key] = time.monotonic()
            return {"full": len(self.members)}
        self.incarnations[rank] += 1
        return self._assign(rank, self.incarnations[rank], key)

    def _find_started(self, number: Any, key: str) -> Member | Header:
        """Return the same for a worker that was started with a rank and an incarnation."""
        match number:
            case [int(rank), int(incarnation)] if rank in self.started:
                pass
            case _:
                raise Malformed(f"Worker {str(number)[:40]!r} was not started by this center.")
        if incarnation != self.started[rank]:
            return FENCED
        before = self.members[rank]
        if before is not None and before.incarnation == incarnation:
            # It reconnects. If the center has given it up meanwhile, it starts another worker for the rank.
            return FENCED if before.key != key or before.finished or before.given_up else before
        if before is not None and before.incarnation < incarnation and self._may_write(before):
            return {"full": len(self.members)}  # its predecessor is fenced off, and ends
        return self._assign(rank, incarnation, key)

    def _find_reconnecting(self, was: Any, key: str) -> Member | None:
        """Return the member that a worker was before it reconnected, if its rank was not reassigned."""
        if not isinstance(was, list) or len(was) != 2 or was[0] not in range(len(self.members)):
            return None
        member = self.members[was[0]]
        if member is None or member.key != key or member.incarnation != was[1] or member.given_up or member.finished:
            return None
        return member

    def _free_rank(self, key: str) -> int | None:
        """Return a rank that no worker has had, or else one whose worker is lost; None if there is none."""
        ranks = [(rank, member) for rank, member in enumerate(self.members) if rank not in self.started]
        unused = [rank for rank, member in ranks if member is None]
        lost = [rank for rank, m in ranks if m and m.lost_at is not None and (m.key == key or not self._may_write(m))]
        return next(iter(unused + lost), None)

    def _may_write(self, member: Member) -> bool:
        """Return whether a member, even a lost one, may be in the middle of writing to memory that is shared with it."""
        return member.shared and (member.heartbeats > 0 or _maps(member.pid, self._shares))

    def _assign(self, rank: int, incarnation: int, key: str) -> Member:
        """Give a rank to a newcomer; uploads of its predecessor are rejected from here on."""
        before = self.members[rank]
        if before is not None:
            before.uploads.begin()
        member = self.members[rank] = Member(rank, incarnation, key)
        return member

    # -- exchanges and heartbeats ---------------------------------------------------------------------------

    def exchange(self, peer: str) -> PendingExchange:
        """Begin an exchange: a commit, or a request for a reply or for the center as it is."""
        return PendingExchange(self)

    def heartbeat(self, header: Header, peer: str) -> Iterator[Header]:
        """Answer a worker's heartbeats until the connection ends."""
        with self.lock:
            member = self.member_of(header)
            member.heartbeats += 1
        over = False
        try:
            while True:
                with self.lock:
                    member.heard_at = time.monotonic()
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
                ended = not member.heartbeats and not member.finished and not member.knows_end
                if ended and member.lost_at is None:
                    member.lost_at = time.monotonic()
                    self.news.append(("away", {**member.identity, "reason": "its connection ended"}))

    def _neighbours(self, member: Member) -> int:
        """Return the number of workers on the same machine: they share its cores."""
        return sum(m is not None and m.machine == member.machine and m.lost_at is None for m in self.members) or 1

    def rejected(self, peer: str, why: str) -> None:
        """Count a rejected client; report the first, second, fourth, eighth ... for each reason."""
        with self.lock:
            kind = why.split(":")[0].split(",")[0][:60]
            kind = kind if kind in self.rejections or len(self.rejections) < KINDS else "other"
            self.rejections[kind] = count = self.rejections.get(kind, 0) + 1
            if count & (count - 1) == 0:
                self.news.append(("rejected", {"peer": peer, "why": why[:300], "count": count}))

    def announce(self) -> None:
        """Wake the exchanges that wait: a reply is in a slot, or a worker was given up."""
        with self.answered:
            self.answered.notify_all()

    def stop(self, reason: str) -> None:
        """End the run: every worker that asks gets the reason."""
        with self.answered:
            self.stopping = reason
            self.answered.notify_all()

    # -- for exchanges --------------------------------------------------------------------------------------

    def member_of(self, header: Header) -> Member:
        """Return the sender of a message; raise if it has no rank here."""
        rank, incarnation = header.get("rank"), header.get("incarnation")
        if not isinstance(rank, int) or not 0 <= rank < len(self.members):
            raise Malformed(f"Worker {str(rank)[:20]!r} is unknown: this run has workers 0 to {len(self.members) - 1}.")
        if header.get("start_id") != self.start_id:
            raise Refused("gone: the center was restarted, so join again.")
        if isinstance(incarnation, int) and self._is_fenced(rank, incarnation):
            raise Refused("fenced: the center took this worker for dead and replaced it.")
        member = self.members[rank]
        if member is None or member.incarnation != incarnation or member.given_up:
            raise Refused("gone: the center has given this worker up, and its rank may be taken, so join again.")
        return member

    def _is_fenced(self, rank: int, incarnation: int) -> bool:
        """Return whether a worker that the center started has been replaced by a later one."""
        return rank in self.started and incarnation < self.started[rank]

    def announce_to_center(self, member: Member, op: Op, sequence: int = 0) -> None:
        """Write a message for the center. Not once the run stops: the pipe's descriptor may soon be another file's."""
        assert self.stopping is None
        os.write(self._message_end, MESSAGE.pack(member.rank, op, member.incarnation, sequence))


def _maps(pid: int, path: str | None) -> bool:
    """Return whether a process of this machine maps the center's memory."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            return path is not None and any(path in line for line in maps)
    except OSError:
        return False


def _describe(layout: Any) -> str:
    if not isinstance(layout, dict):
        return "none"
    return f"{layout.get('parameters')} parameters of {layout.get('dtype')} ({layout.get('names')})"
