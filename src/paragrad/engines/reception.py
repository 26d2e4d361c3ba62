"""Where workers from elsewhere are received: who sits where, and what becomes of what they send. Its threads never touch the
center: they lay a commit out in a slot and say so in the pipe, as a worker of this machine does, and wait for its answer."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from paragrad.center import Center
from paragrad.codecs.codec import Codec, size
from paragrad.engines.localworker import Reader
from paragrad.engines.memory import boot
from paragrad.engines.shared import Segment, plain_layout
from paragrad.engines.slot import MESSAGE, Op, Slot
from paragrad.errors import UsageError
from paragrad.job import Job
from paragrad.transport.message import PROTOCOL, Malformed, Refused, Vectors, declared
from paragrad.types import Commit, Reply

HOLD = 20.0
"""Seconds that an exchange waits for its answer before the worker is told to ask again."""
CODED = "coded."
"""Before the names of the tensors that a codec makes of a value."""
BEAT = 1.0
"""Seconds between two signs of life."""
KINDS = 64
"""Reasons for which somebody was turned away that are counted apart."""


@dataclass
class Guest:
    """A worker that sits, or sat, on a place."""

    rank: int
    incarnation: int
    key: str
    """What it is known by: drawn anew by every process that joins."""
    where: str = ""
    pid: int = 0
    machine: str = ""
    shared: bool = False
    """It is on this machine, and maps the center's memory."""
    seen: float = field(default_factory=time.monotonic)
    stays: int = 0
    """Connections over which it says that it is there."""
    ready: bool = False
    finished: bool = False
    lost_at: float | None = None
    silent: bool = False
    """It is taken for lost because nothing was heard of it."""
    given_up: bool = False
    """It was lost for so long that its place is no longer its own."""
    told: bool = False
    """It knows that the run is over."""
    said: int = 0
    """The sequence of what it last brought (below 0: that it is there), which is answered before it may bring more."""
    ticket: int = 0
    """Counts its exchanges: only the latest counts, a thread that still reads an earlier one stops."""
    filling: threading.Lock = field(default_factory=threading.Lock)
    """Held while bytes are put into its slot."""

    @property
    def here(self) -> bool:
        """Whether it works, or could."""
        return self.ready and not self.finished and self.lost_at is None

    def take_ticket(self) -> int:
        """From here on no earlier exchange puts bytes into its slot."""
        with self.filling:
            self.ticket += 1
            return self.ticket


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
        self._news = threading.Condition(self.lock)
        self._job = job
        self._center = center
        self._segment = segment
        self._slots = slots
        self._mouth = mouth
        self._waker = waker
        self._about = about
        self._layout = layout
        self._fingerprint = data
        self._shares = shares
        self._window = window
        self._reserved = reserved
        """The first places are for workers that the center starts itself."""
        self.shards: list[tuple[int, int, str]] = []
        """From where to where those go that hold the rest of the center, and their addresses."""
        self.announced: dict[int, str | None] = {}
        """The shards that are started by hand, and where each was last heard of."""
        self.closed = False
        """Whether newcomers wait until the center is whole."""
        self._reader = Reader(segment)
        self._rooms: dict[int, torch.Tensor] = {}
        self.life = os.urandom(8).hex()
        """Changes when the center is started again."""

    # -- short questions ------------------------------------------------------------------------------------

    def ask(self, name: str, head: dict[str, Any], peer: str) -> dict[str, Any]:
        """``about``: what is trained here. ``join``: a place. ``leave``: it is free again."""
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
        if name == "leave":
            with self.lock:
                guest = self._guest(head)
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
                    self._say(guest, Op.LEFT)
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
                told = {"rank": rank, "pid": guest.pid, "incarnation": guest.incarnation, "host": guest.where}
                self.news.append(("worker", told))
            told = {
                "rank": rank,
                "incarnation": guest.incarnation,
                "life": self.life,
                "workers": len(self.guests),
                "window": self._window,
                "answers": bool(self._center.answers),
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
            guest = self._guest(head)
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
                    told = {"rank": guest.rank, "incarnation": guest.incarnation}
                    self.news.append(("away", {**told, "reason": "its connection ended"}))

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
        with self._news:
            self._news.notify_all()

    def stop(self, reason: str) -> None:
        """The run is over: all who ask are told so."""
        with self._news:
            self.stopping = reason
            self._news.notify_all()

    # -- for exchanges --------------------------------------------------------------------------------------

    def _guest(self, head: dict[str, Any]) -> Guest:
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

    def _say(self, guest: Guest, op: Op, sequence: int = 0) -> None:
        """A message for the center; not once it stops, when the pipe's number may soon be another file's."""
        assert self.stopping is None
        os.write(self._mouth, MESSAGE.pack(guest.rank, op, guest.incarnation, sequence))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # who has that much to read is awake
            os.write(self._waker, b"\0")


class Exchanging:
    """One exchange of one guest."""

    def __init__(self, reception: Reception) -> None:
        self._at = reception
        self._guest: Guest | None = None
        self._ticket = 0
        self._commit: Commit | None = None
        self._coded: dict[str, torch.Tensor] = {}

    def begin(self, head: dict[str, Any]) -> Vectors:
        """Who it is, what is wanted, and where the vectors go."""
        at = self._at
        with at.lock:
            guest = self._guest = at._guest(head)
            guest.seen = time.monotonic()
            self._ticket = guest.take_ticket()
        op = head.get("op")
        if op not in ("begin", "commit", "again", "pull"):
            raise Malformed(f"{str(op)[:20]!r} is nothing that an exchange can be.")
        if op != "commit":
            return {}
        if at.shards and head.get("staged") != at.life:
            raise Refused("gone: the rest of the commit lies with the shards of a center that was started again since.")
        slot = at._slots[guest.rank]
        self._commit = _commit_of(head, guest, slot, at._job, at._window)
        if guest.said not in (0, self._commit.sequence) and not slot.answered(guest.said):
            raise Malformed(f"Commit {self._commit.sequence}, while what came before it is not answered yet.")
        if guest.shared:
            return {}
        vectors: dict[str, torch.Tensor] = {"value": self._commit.value}
        if at._job.codec is not None:
            self._coded = _rooms_for(head, at._job.codec, self._commit.value.numel())
            vectors = {CODED + name: tensor for name, tensor in self._coded.items()}
        vectors |= {f"also.{name}": vector for name, vector in self._commit.also.items()}
        vectors |= {"buffers": slot.buffers, "integers": slot.integers}
        return {name: vector for name, vector in vectors.items() if vector.numel() or name.startswith(CODED)}

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Around every piece that is put into the slot: not once a later exchange of the same worker has begun."""
        guest = self._guest
        assert guest is not None
        with guest.filling:
            if guest.ticket != self._ticket:
                raise Refused("gone: a later exchange of the same worker has begun.")
            yield

    def finish(self, head: dict[str, Any]) -> tuple[dict[str, Any], Vectors]:
        """Say what has come, wait for the answer, and give it."""
        at, guest = self._at, self._guest
        assert guest is not None
        rank, op = guest.rank, head["op"]
        if op == "pull":
            room = self._room()
            return {"clock": at._reader.pull(room)}, {"value": room}
        slot = at._slots[rank]
        joined = -1 - guest.incarnation
        sequence = joined if op == "begin" else _whole(head, "sequence", joined)
        if self._coded:
            self._decode()
        with at.lock:
            if guest.ticket != self._ticket or at.guests[rank] is not guest:
                raise Refused("gone: a later exchange of the same worker has begun.")
            if at.stopping is None and op != "again":
                guest.said = sequence
                if self._commit is not None and not guest.shared:
                    slot.put_commit(self._commit)
                at._say(guest, Op.READY if self._commit is None else Op.COMMIT, max(0, sequence))
            until = time.monotonic() + HOLD
            while not slot.answered(sequence):
                if at.stopping is not None:
                    return {"stop": at.stopping}, {}
                if guest.ticket != self._ticket or at.guests[rank] is not guest or guest.given_up:
                    raise Refused("gone: the worker was given up, or asks again elsewhere.")
                left = until - time.monotonic()
                if left <= 0:
                    return {"pending": True}, {}
                at._news.wait(min(left, 1.0))
            if guest.shared:
                return {}, {}
            answers = at._center.answers
            reply = slot.get_reply(answers[rank] if answers else slot.value)
        return self._answer(reply)

    def _decode(self) -> None:
        """What has come coded, beside the slot: if it came before, the center may be reading what lies there."""
        codec, commit = self._at._job.codec, self._commit
        assert codec is not None
        assert commit is not None
        try:
            commit.value = codec.decode(self._coded, torch.empty_like(commit.value))
        except UsageError as error:
            raise Malformed(str(error)) from None
        commit.coded_bytes = size(self._coded)

    def _answer(self, reply: Reply) -> tuple[dict[str, Any], Vectors]:
        value, version = reply.value, reply.version
        if not self._at._center.answers:
            value = self._room()
            version = self._at._reader.pull(value)
        vectors: dict[str, torch.Tensor | None] = {"value": value, "buffers": reply.buffers, "integers": reply.integers}
        head = {
            "sequence": reply.sequence,
            "version": version,
            "steps": reply.steps,
            "batches": list(reply.batches),
            "applied": reply.applied,
            "done": reply.done,
            "last": reply.last,
            "progress": reply.progress,
        }
        return head, {name: vector for name, vector in vectors.items() if vector is not None and vector.numel()}

    def _room(self) -> torch.Tensor:
        """A vector of this guest's own, to copy the center into before it is sent: sending may take its time."""
        assert self._guest is not None
        rooms, rank = self._at._rooms, self._guest.rank
        if rank not in rooms:
            rooms[rank] = torch.empty_like(self._at._reader.live_value)
        return rooms[rank]


# -- what a head may say --------------------------------------------------------------------------------------------


def _rooms_for(head: dict[str, Any], codec: Codec, length: int) -> dict[str, torch.Tensor]:
    """Room for a coded value, of the lengths that the head declares; no more than a vector of that length can become."""
    said, rooms = declared(head), {}
    for name, piece in codec.layout(length).items():
        dtype, count = said.get(CODED + name, (None, 0))
        if dtype is not piece.dtype or count > piece.length:
            raise Malformed(
                f"{CODED + name} is not what {codec.name} makes of {length:,} values: worker and center must have the same "
                "codec and model."
            )
        rooms[name] = torch.empty(count, dtype=piece.dtype)
    return rooms


def _commit_of(head: dict[str, Any], guest: Guest, slot: Slot, job: Job, window: int) -> Commit:
    """A commit, all but its vectors, of which the places are named; raises where it cannot be one."""
    whole: dict[str, Any] = {name: _whole(head, name, 0) for name in ("sequence", "version", "steps", "rows", "part", "saw")}
    if whole["sequence"] < 1:
        raise Malformed("A commit is numbered from 1.")
    if whole["part"] >= job.scheme.parts:
        raise Malformed(f"Part {whole['part']}, but the vector has {job.scheme.parts}.")
    batches, pulls = (_wholes(head, name, most) for name, most in (("batches", window), ("pulls", slot.pulls.numel() - 1)))
    path = head.get("path")
    length, parts = slot.value.numel(), job.scheme.parts
    mine = length * (whole["part"] + 1) // parts - length * whole["part"] // parts
    return Commit(
        worker=guest.rank,
        incarnation=guest.incarnation,
        value=slot.value[:mine],
        also={name: vector[:mine] for name, vector in slot.also.items()},
        buffers=slot.buffers if slot.buffers.numel() else None,
        integers=slot.integers if slot.integers.numel() else None,
        batches=batches,
        pulls=pulls,
        path=_path(path, slot.path.numel() // 2) if path is not None else None,
        weight=_number(head, "weight"),
        loss=_number(head, "loss"),
        lr=_number(head, "lr"),
        seconds=_number(head, "seconds"),
        distance=_number(head, "distance"),
        **whole,
    )


def head_of(commit: Commit) -> dict[str, Any]:
    """What a worker says of its commit; the inverse."""
    names = ("sequence", "version", "steps", "rows", "part", "saw", "weight", "loss", "lr", "seconds", "distance")
    head: dict[str, Any] = {name: getattr(commit, name) for name in names}
    head |= {"batches": list(commit.batches), "pulls": list(commit.pulls)}
    return head if commit.path is None else head | {"path": [list(point) for point in commit.path]}


def _whole(head: dict[str, Any], name: str, least: int) -> int:
    value = head.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
        raise Malformed(f"{name} is {str(value)[:20]!r}, but it is a whole number of at least {least}.")
    return value


def _wholes(head: dict[str, Any], name: str, most: int) -> tuple[int, ...]:
    values = head.get(name)
    if not isinstance(values, list) or len(values) > most:
        raise Malformed(f"{name} is no list of at most {most} whole numbers.")
    return tuple(_whole({name: value}, name, 0) for value in values)


def _number(head: dict[str, Any], name: str) -> float:
    value = head.get(name, math.nan)
    try:
        if not isinstance(value, bool) and isinstance(value, int | float):
            return float(value)
    except OverflowError:  # a whole number of many digits
        pass
    raise Malformed(f"{name} is {str(value)[:20]!r}, but it is a number.")


def _path(given: Any, length: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    match given:
        case [list(first), list(last)] if len(first) == len(last) == length:
            first, last = ([_number({"path": value}, "path") for value in point] for point in (first, last))
            return tuple(first), tuple(last)
    raise Malformed(f"A path is not two points of {length} numbers.")


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
