"""One exchange of one worker from elsewhere: its commit is laid out in a slot, its answer is waited for and given."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from paragrad.codecs.codec import size
from paragrad.engines.guests import Guest
from paragrad.engines.heads import CODED, commit_of, decoded, rooms_for, whole_number, whole_numbers
from paragrad.engines.slot import Op
from paragrad.transport.message import Malformed, Refused, Vectors, declared
from paragrad.types import Commit, Reply

if TYPE_CHECKING:
    from paragrad.engines.reception import Reception

HOLD = 20.0
"""Seconds that an exchange waits for its answer before the worker is told to ask again."""


class Exchanging:
    """One exchange of one guest."""

    def __init__(self, reception: Reception) -> None:
        self._at = reception
        self._guest: Guest | None = None
        self._ticket = 0
        self._commit: Commit | None = None
        self._coded: dict[str, torch.Tensor] = {}
        self._residual: torch.Tensor | None = None

    def begin(self, head: dict[str, Any]) -> Vectors:
        """Who it is, what is wanted, and where the vectors go."""
        at = self._at
        with at.lock:
            guest = self._guest = at.guest_of(head)
            guest.seen = time.monotonic()
            self._ticket = guest.take_ticket()
        op = head.get("op")
        if op not in ("begin", "commit", "again", "pull", "bring"):
            raise Malformed(f"{str(op)[:20]!r} is nothing that an exchange can be.")
        if at.codec is not None and op in ("commit", "bring") and "residual" in declared(head):
            like = at.slots[guest.rank].value
            self._residual = torch.empty(at.shards[-1][1] if at.shards else like.numel(), dtype=like.dtype)
        left = {} if self._residual is None else {"residual": self._residual}
        if op != "commit":
            return left
        if at.shards and head.get("staged") != at.life:
            raise Refused("gone: the rest of the commit lies with the shards of a center that was started again since.")
        slot = at.slots[guest.rank]
        self._commit = commit_of(head, guest, slot, at.job, at.window)
        if guest.said not in (0, self._commit.sequence) and not slot.answered(guest.said):
            raise Malformed(f"Commit {self._commit.sequence}, while what came before it is not answered yet.")
        if guest.shared:
            return left
        vectors: dict[str, torch.Tensor] = {"value": self._commit.value}
        if at.codec is not None:
            self._coded = rooms_for(head, at.codec, self._commit.value.numel())
            vectors = {CODED + name: tensor for name, tensor in self._coded.items()}
        vectors |= {f"also.{name}": vector for name, vector in self._commit.also.items()}
        vectors |= {"buffers": slot.buffers, "integers": slot.integers, **left}
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
            return {"clock": at.reader.pull(room)}, {"value": room}
        if op == "bring":
            with at.lock:
                if at.guests[rank] is guest:
                    at.brought[rank] = whole_number(head, "sequence", 0), self._residual
            return {}, {}
        slot = at.slots[rank]
        joined = -1 - guest.incarnation
        sequence = joined if op == "begin" else whole_number(head, "sequence", joined)
        kept = whole_numbers(head, "kept", 2) if op == "begin" and "kept" in head else ()
        if self._coded:
            self._decode(head)
        with at.lock:
            if guest.ticket != self._ticket or at.guests[rank] is not guest:
                raise Refused("gone: a later exchange of the same worker has begun.")
            if at.stopping is None and op != "again":
                guest.said, guest.kept = sequence, kept
                if self._residual is not None:
                    at.brought[rank] = sequence, self._residual
                if self._commit is not None and not guest.shared:
                    slot.put_commit(self._commit)
                at.say_to_center(guest, Op.READY if self._commit is None else Op.COMMIT, max(0, sequence))
            until = time.monotonic() + HOLD
            while not slot.answered(sequence):
                if at.stopping is not None:
                    return {"stop": at.stopping}, {}
                if guest.ticket != self._ticket or at.guests[rank] is not guest or guest.given_up:
                    raise Refused("gone: the worker was given up, or asks again elsewhere.")
                left = until - time.monotonic()
                if left <= 0:
                    return {"pending": True}, {}
                at.answered.wait(min(left, 1.0))
            answers = at.center.answers
            reply = slot.get_reply(answers[rank] if answers else slot.value)
            said, vectors = self._left(reply)
        if guest.shared:
            return {"last": reply.last, **said}, vectors
        head, more = self._answer(reply)
        return head | said, {**more, **vectors}

    def _left(self, reply: Reply) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What is to be said of what a codec leaves out: whether it is wanted, and what of it a newcomer goes on from."""
        at = self._at
        said = {"wanted": True} if at.wants_residuals else {}
        if reply.sequence >= 0 or reply.worker not in at.handed:
            return said, {}
        given = at.handed[reply.worker]
        return (said | {"keep": True}, {}) if given is None else (said, {"residual": given})

    def _decode(self, head: dict[str, Any]) -> None:
        """What has come coded, beside the slot: if it came before, the center may be reading what lies there."""
        codec, commit = self._at.codec, self._commit
        assert codec is not None
        assert commit is not None
        commit.value = decoded(codec, self._coded, commit.value)
        beside = whole_number(head, "beside", 0) if self._at.shards else 0
        commit.coded_bytes = beside + size(self._coded | ({} if self._residual is None else {"residual": self._residual}))

    def _answer(self, reply: Reply) -> tuple[dict[str, Any], Vectors]:
        value, version = reply.value, reply.version
        if not self._at.center.answers:
            value = self._room()
            version = self._at.reader.pull(value)
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
        rooms, rank = self._at.rooms, self._guest.rank
        if rank not in rooms:
            rooms[rank] = torch.empty_like(self._at.reader.live_value)
        return rooms[rank]
