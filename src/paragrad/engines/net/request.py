"""One exchange of one worker over a network: its commit goes into its slot, and its reply is sent back once it is there."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from paragrad.codecs.codec import size
from paragrad.engines.exchange.slot import Op
from paragrad.engines.net.member import Member
from paragrad.engines.transport import header as headers
from paragrad.engines.transport.header import (
    commit_vectors,
    decoded,
    flat,
    most_bytes,
    put_state,
    reply_vectors,
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
"""Seconds that an exchange waits for its reply before the worker must ask again."""
OPERATIONS = ("begin", "commit", "again", "pull", "bring")


class PendingExchange:
    """One exchange of one member. No Commit or Reply is made here: numbers go from the wire into the slot and back."""

    _member: Member
    """The sender, known from ``begin`` on."""
    _upload: int
    """Number of this exchange among the member's."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._commit: dict[str, Any] | None = None
        """The numbers and lists of a commit."""
        self._coded: dict[str, torch.Tensor] = {}
        self._residual: torch.Tensor | None = None
        self._state: dict[str, torch.Tensor] | None = None

    def begin(self, header: Header) -> Vectors:
        """Check the sender and the operation; return the memory that the vectors go into."""
        membership = self._membership
        with membership.lock:
            member = self._member = membership.member_of(header)
            member.heard_at = time.monotonic()
            self._upload = member.uploads.begin()
        op = header.get("op")
        if op not in OPERATIONS:
            raise Malformed(f"Unknown operation {str(op)[:20]!r} of an exchange.")
        slot, codec, shards = membership.slots[member.rank], membership.codec, membership.shards
        length = shards[-1][1] if shards else slot.value.numel()
        if op in ("commit", "bring"):
            if codec is not None and "residual" in declared(header):
                self._residual = torch.empty(length, dtype=slot.value.dtype)
            self._state = rooms_for_state(header, most_bytes(length, slot.value.element_size()))
        private = flat(self._state) | ({} if self._residual is None else {"residual": self._residual})
        if op != "commit":
            return private
        if shards and header.get("staged") != membership.start_id:
            raise Refused("gone: the shards that have the rest of this commit belong to an earlier start of the center.")
        sender = {"worker": member.rank, "incarnation": member.incarnation, **COMMIT.stamped}
        commit = self._commit = headers.read(COMMIT, {**header, **sender}, membership.most)
        if commit["part"] >= slot.parts:
            raise Malformed(f"Part {commit['part']}, but the vector has {slot.parts}.")
        if member.sequence not in (0, commit["sequence"]) and not slot.is_answered(member.sequence):
            raise Malformed(f"Commit {commit['sequence']} came while the one before it is not answered yet.")
        if member.shared:
            return private
        count = slot.size_of(commit["part"])
        if codec is not None:
            self._coded = rooms_for(header, codec, count)
        return commit_vectors(slot, count, None if codec is None else self._coded, private)

    def filling(self) -> AbstractContextManager[None]:
        """Guard the writing of one piece; raise ``Refused`` if a later exchange of the same worker has begun."""
        return self._member.uploads.write(self._upload)

    def finish(self, header: Header) -> tuple[Header, Vectors]:
        """Announce to the center what has arrived, wait for the reply, and return it."""
        membership, member = self._membership, self._member
        slot = membership.slots[member.rank]
        if header["op"] == "pull":
            room = self._room()
            return {"clock": membership.reader.pull(room)}, {"value": room}
        if header["op"] == "bring":
            self._bring(header)
            return {}, {}
        sequence = self._announce(header)
        with membership.lock:
            instead = self._wait(sequence)
            if instead is not None:
                return instead, {}
            reply = REPLY.header(slot.reply)
            fields, vectors = self._private(reply)
        if member.shared:
            return {"last": reply["last"], **fields}, vectors
        if membership.center.answers:
            value = membership.center.answers[member.rank]
        else:
            value = self._room()
            reply["version"] = membership.reader.pull(value)
        return reply | fields, reply_vectors(slot, value, vectors)

    def _bring(self, header: Header) -> None:
        """Keep the private state or the residual that a worker brings after its last commit."""
        membership, member = self._membership, self._member
        with membership.lock:
            if membership.members[member.rank] is member:
                sequence = whole_number(header, "sequence", 0)
                if self._state is None:
                    membership.brought[member.rank] = sequence, self._residual
                else:
                    membership.states[member.rank] = sequence, self._state

    def _announce(self, header: Header) -> int:
        """Announce to the center what has arrived; return the sequence that it will answer."""
        membership, member, op = self._membership, self._member, header["op"]
        rank, joined = member.rank, -1 - member.incarnation
        sequence = joined if op == "begin" else whole_number(header, "sequence", joined)
        kept = whole_numbers(header, "kept", 2) if op == "begin" and "kept" in header else ()
        value = self._decoded(header) if self._coded else None
        with membership.lock:
            member.uploads.check(self._upload)
            if membership.stopping is not None or op == "again":
                return sequence
            member.sequence, member.kept = sequence, kept
            if self._residual is not None:
                membership.brought[rank] = sequence, self._residual
            if self._state is not None:
                membership.states[rank] = sequence, self._state
            if self._commit is not None and not member.shared:
                slot = membership.slots[rank]
                slot.commit.put(self._commit)
                if value is not None:
                    slot.value[: value.numel()].copy_(value)
            membership.announce_to_center(member, Op.READY if self._commit is None else Op.COMMIT, max(0, sequence))
        return sequence

    def _wait(self, sequence: int) -> Header | None:
        """Wait for the reply, under the lock. Return None once it is there, else the header to send instead."""
        membership, member = self._membership, self._member
        until = time.monotonic() + HOLD
        while not membership.slots[member.rank].is_answered(sequence):
            if membership.stopping is not None:
                return {"stop": membership.stopping}
            member.uploads.check(self._upload)
            if member.given_up:
                raise Refused("gone: the center has given this worker up.")
            left = until - time.monotonic()
            if left <= 0:
                return {"pending": True}
            membership.answered.wait(min(left, 1.0))
        return None

    def _private(self, reply: Header) -> tuple[Header, dict[str, torch.Tensor]]:
        """Return fields and vectors that go with a reply: the request for private state, and a newcomer's private state."""
        membership, rank, joins = self._membership, reply["worker"], reply["sequence"] < 0
        fields: Header = {"wanted": True} if membership.wants_private else {}
        shapes, vectors = put_state(membership.slots[rank].handed if joins else None, sys.maxsize)
        fields |= shapes
        if joins and rank in membership.handed:
            residual = membership.handed[rank]
            if residual is None:
                fields["keep"] = True
            else:
                vectors["residual"] = residual
        return fields, vectors

    def _decoded(self, header: Header) -> torch.Tensor:
        """Decode a value outside the slot: if the same commit came before, the center may be reading the slot."""
        codec, commit = self._membership.codec, self._commit
        assert codec is not None
        assert commit is not None
        slot = self._membership.slots[self._member.rank]
        beside = whole_number(header, "beside", 0) if self._membership.shards else 0
        commit["bytes"] = beside + size(self._coded | ({} if self._residual is None else {"residual": self._residual}))
        return decoded(codec, self._coded, slot.value[: slot.size_of(commit["part"])])

    def _room(self) -> torch.Tensor:
        """Return a vector of this member only: the center is copied into it before it is sent, which may take a while."""
        rooms, rank = self._membership.rooms, self._member.rank
        if rank not in rooms:
            rooms[rank] = torch.empty_like(self._membership.reader.live_value)
        return rooms[rank]
