"""One exchange of one worker over a network: its commit goes into its slot, its reply is waited for and sent back."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from paragrad.codecs.codec import size
from paragrad.engines.exchange.slot import Op
from paragrad.engines.net.member import Member
from paragrad.engines.transport import header as headers
from paragrad.engines.transport.header import (
    CODED,
    decoded,
    flat,
    most_bytes,
    put_state,
    rooms_for,
    rooms_for_state,
    whole_number,
    whole_numbers,
)
from paragrad.engines.transport.message import Malformed, Refused, Vectors, declared
from paragrad.engines.transport.transport import Header
from paragrad.types import COMMIT, REPLY

if TYPE_CHECKING:
    from paragrad.engines.net.membership import Membership

HOLD = 20.0
"""Seconds that an exchange waits for its reply before the worker is told to ask again."""
OPERATIONS = ("begin", "commit", "again", "pull", "bring")
GONE = "gone: a later exchange of the same worker has begun."


class PendingExchange:
    """One exchange of one member. No Commit or Reply is made here: numbers go from the wire into the slot and back."""

    def __init__(self, membership: Membership) -> None:
        self._at = membership
        self._member: Member | None = None
        self._ticket = 0
        self._commit: dict[str, Any] | None = None
        """The numbers and lists of a commit."""
        self._coded: dict[str, torch.Tensor] = {}
        self._residual: torch.Tensor | None = None
        self._state: dict[str, torch.Tensor] | None = None

    def begin(self, header: Header) -> Vectors:
        """Check who it is and what is wanted; return where the vectors go."""
        at = self._at
        with at.lock:
            member = self._member = at.member_of(header)
            member.seen = time.monotonic()
            self._ticket = member.take_ticket()
        op = header.get("op")
        if op not in OPERATIONS:
            raise Malformed(f"Unknown operation {str(op)[:20]!r} of an exchange.")
        slot = at.slots[member.rank]
        length = at.shards[-1][1] if at.shards else slot.value.numel()
        if op in ("commit", "bring"):
            if at.codec is not None and "residual" in declared(header):
                self._residual = torch.empty(length, dtype=slot.value.dtype)
            self._state = rooms_for_state(header, most_bytes(length, slot.value.element_size()))
        further = flat(self._state) | ({} if self._residual is None else {"residual": self._residual})
        if op != "commit":
            return further
        if at.shards and header.get("staged") != at.start_id:
            raise Refused("gone: the rest of the commit is with the shards of a center that was restarted since.")
        mine = {"worker": member.rank, "incarnation": member.incarnation, **COMMIT.stamped}
        commit = self._commit = headers.read(COMMIT, {**header, **mine}, at.most)
        if commit["part"] >= slot.parts:
            raise Malformed(f"Part {commit['part']}, but the vector has {slot.parts}.")
        if member.said not in (0, commit["sequence"]) and not slot.is_answered(member.said):
            raise Malformed(f"Commit {commit['sequence']}, while the one before it is not answered yet.")
        if member.shared:
            return further
        count = slot.size_of(commit["part"])
        vectors: dict[str, torch.Tensor] = {"value": slot.value[:count]}
        if at.codec is not None:
            self._coded = rooms_for(header, at.codec, count)
            vectors = {CODED + name: tensor for name, tensor in self._coded.items()}
        vectors |= {f"also.{name}": vector[:count] for name, vector in slot.also.items()}
        vectors |= {"buffers": slot.buffers, "integers": slot.integers, **further}
        return {name: vector for name, vector in vectors.items() if vector.numel() or name.startswith(CODED)}

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Guard every piece that is put into the slot: none is, once a later exchange of the same worker has begun."""
        member = self._member
        assert member is not None
        with member.filling:
            if member.ticket != self._ticket:
                raise Refused(GONE)
            yield

    def finish(self, header: Header) -> tuple[Header, Vectors]:
        """Announce to the center what has arrived, wait for the reply, and return it."""
        at, member = self._at, self._member
        assert member is not None
        if header["op"] == "pull":
            room = self._room()
            return {"clock": at.reader.pull(room)}, {"value": room}
        if header["op"] == "bring":
            self._bring(header)
            return {}, {}
        sequence = self._announce(header)
        with at.lock:
            waits = self._wait(sequence)
            if waits is not None:
                return waits, {}
            reply = REPLY.header(at.slots[member.rank].reply)
            said, vectors = self._private(reply)
        if member.shared:
            return {"last": reply["last"], **said}, vectors
        return self._answer(reply, said, vectors)

    def _bring(self, header: Header) -> None:
        """Keep what a worker has brought after its last commit."""
        at, member = self._at, self._member
        assert member is not None
        with at.lock:
            if at.members[member.rank] is member:
                sequence = whole_number(header, "sequence", 0)
                if self._state is None:
                    at.brought[member.rank] = sequence, self._residual
                else:
                    at.states[member.rank] = sequence, self._state

    def _announce(self, header: Header) -> int:
        """Tell the center what has arrived; return the sequence that will be answered."""
        at, member, op = self._at, self._member, header["op"]
        assert member is not None
        rank, joined = member.rank, -1 - member.incarnation
        sequence = joined if op == "begin" else whole_number(header, "sequence", joined)
        kept = whole_numbers(header, "kept", 2) if op == "begin" and "kept" in header else ()
        value = self._decoded(header) if self._coded else None
        with at.lock:
            if member.ticket != self._ticket or at.members[rank] is not member:
                raise Refused(GONE)
            if at.stopping is not None or op == "again":
                return sequence
            member.said, member.kept = sequence, kept
            if self._residual is not None:
                at.brought[rank] = sequence, self._residual
            if self._state is not None:
                at.states[rank] = sequence, self._state
            if self._commit is not None and not member.shared:
                slot = at.slots[rank]
                slot.commit.put(self._commit)
                if value is not None:
                    slot.value[: value.numel()].copy_(value)
            at.announce_to_center(member, Op.READY if self._commit is None else Op.COMMIT, max(0, sequence))
        return sequence

    def _wait(self, sequence: int) -> Header | None:
        """Wait for the reply, under the lock; return None once it is there, else what the worker is told instead."""
        at, member = self._at, self._member
        assert member is not None
        until = time.monotonic() + HOLD
        while not at.slots[member.rank].is_answered(sequence):
            if at.stopping is not None:
                return {"stop": at.stopping}
            if member.ticket != self._ticket or at.members[member.rank] is not member or member.given_up:
                raise Refused("gone: the worker was given up, or asks again elsewhere.")
            left = until - time.monotonic()
            if left <= 0:
                return {"pending": True}
            at.answered.wait(min(left, 1.0))
        return None

    def _private(self, reply: Header) -> tuple[Header, dict[str, torch.Tensor]]:
        """Return what goes with a reply: whether private state is wanted, and what of it a newcomer continues from."""
        at, rank, joins = self._at, reply["worker"], reply["sequence"] < 0
        said: Header = {"wanted": True} if at.wants_more else {}
        shapes, vectors = put_state(at.slots[rank].handed if joins else None, sys.maxsize)
        said |= shapes
        if not joins or rank not in at.handed:
            return said, vectors
        given = at.handed[rank]
        return (said | {"keep": True}, vectors) if given is None else (said, vectors | {"residual": given})

    def _decoded(self, header: Header) -> torch.Tensor:
        """Decode a value, beside the slot: if the commit came before, the center may be reading what is there."""
        codec, commit = self._at.codec, self._commit
        assert codec is not None
        assert commit is not None
        assert self._member is not None
        slot = self._at.slots[self._member.rank]
        beside = whole_number(header, "beside", 0) if self._at.shards else 0
        commit["bytes"] = beside + size(self._coded | ({} if self._residual is None else {"residual": self._residual}))
        return decoded(codec, self._coded, slot.value[: slot.size_of(commit["part"])])

    def _answer(self, reply: Header, said: Header, vectors: dict[str, torch.Tensor]) -> tuple[Header, Vectors]:
        at, slot = self._at, self._at.slots[reply["worker"]]
        if at.center.answers:
            value = at.center.answers[reply["worker"]]
        else:
            value = self._room()
            reply["version"] = at.reader.pull(value)
        rooms = {"value": value, "buffers": slot.reply_buffers, "integers": slot.reply_integers}
        return reply | said, {**{name: room for name, room in rooms.items() if room.numel()}, **vectors}

    def _room(self) -> torch.Tensor:
        """Return a vector of this member's own, to copy the center into before it is sent: sending may take its time."""
        assert self._member is not None
        rooms, rank = self._at.rooms, self._member.rank
        if rank not in rooms:
            rooms[rank] = torch.empty_like(self._at.reader.live_value)
        return rooms[rank]
