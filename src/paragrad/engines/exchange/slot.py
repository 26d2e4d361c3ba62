"""One worker's slot in the memory that it shares with the center: its commit, and the reply."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from paragrad.core.job import Job
from paragrad.core.layout import Row
from paragrad.core.state import Allocate
from paragrad.core.worker import DRAWN
from paragrad.learners.learner import Learner
from paragrad.schemes.traits import is_shared, pull_every
from paragrad.types import COMMIT, REPLY, Commit, Reply, Vector, WorkerState


class Op(IntEnum):
    """The operation of a message in the shared pipe."""

    READY = 1
    """The worker has warmed up. A replacement uses its predecessor's slot only after the center has read this message."""
    COMMIT = 2
    LEFT = 3


MESSAGE = struct.Struct("<HHIQ")
"""(worker, operation, incarnation, sequence): 16 bytes, below PIPE_BUF, so that a write is atomic."""

WANTED, BROUGHT, HANDED = range(3)
"""Indices of ``Slot.states``."""


def most(job: Job, parameters: int, window: int) -> dict[str, int]:
    """Return the largest length of each list of a commit and of a reply."""
    fetch, drawn = pull_every(job.scheme), parameters <= DRAWN and not is_shared(job.scheme)
    return {
        "batches": window,
        "pulls": 1 + (window // fetch + 1 if fetch else 0),
        "path": 2 * parameters if drawn else 0,
    }


@dataclass
class Slot:
    """The memory of one worker. The worker writes it until it sends its message, then the center does."""

    worker: int
    commit: Row
    reply: Row
    answered: Any
    """Sequence of the commit that ``reply`` answers, or a negative number after joining. It is written last."""
    value: Vector
    also: dict[str, Vector]
    buffers: Vector
    integers: Vector
    reply_buffers: Vector
    reply_integers: Vector
    residuals: list[Vector]
    """Residuals of a codec: two rows; the worker reads one and writes the other. Empty without a codec, or if the worker keeps
    them elsewhere."""
    residual_row: torch.Tensor
    """Index of the residual that was written last; empty without a codec."""
    states: torch.Tensor
    """For private state in files. ``WANTED``: 1 if the next commit must bring it. ``BROUGHT``: sequence of the last commit that
    it was written for, negative if the disk was full. ``HANDED``: 1 if there is a file for a worker that joins."""
    parts: int = 1
    brought: WorkerState | None = field(default=None, init=False)
    handed: WorkerState | None = field(default=None, init=False)
    """Private state that a commit brings, and that a joining worker gets, if both sides are in one process."""

    @classmethod
    def make(
        cls,
        allocate: Allocate,
        worker: int,
        job: Job,
        learner: Learner,
        *,
        window: int,
        by_reference: bool = False,
        residuals: bool = False,
        part: int | None = None,
    ) -> Slot:
        """Allocate the slot of a worker; or open it, if ``allocate`` returns tensors of a segment.

        ``residuals``: the slot includes the residuals of a codec. ``part``: it holds only this many first values.
        """
        scheme, like, coded = job.scheme, learner.weights[:part], job.codec is not None

        def tensor(name: str, length: int, dtype: torch.dtype) -> torch.Tensor:
            return allocate(f"slot{worker}.{name}", length, dtype)

        length, limits = 0 if is_shared(scheme) or by_reference else like.numel(), most(job, like.numel(), window)
        return cls(
            worker=worker,
            commit=COMMIT.row(lambda name, n, dtype: tensor(f"commit.{name}", n, dtype), limits),
            reply=REPLY.row(lambda name, n, dtype: tensor(f"reply.{name}", n, dtype), limits),
            answered=tensor("answered", 1, torch.int64).numpy(),
            value=tensor("value", length, like.dtype),
            also={name: tensor(f"also.{name}", length, like.dtype) for name in scheme.sends},
            buffers=tensor("buffers", learner.buffers.numel(), like.dtype),
            integers=tensor("integers", learner.integers.numel(), torch.int64),
            reply_buffers=tensor("reply_buffers", learner.buffers.numel(), like.dtype),
            reply_integers=tensor("reply_integers", learner.integers.numel(), torch.int64),
            residuals=[tensor(f"residual{row}", length, like.dtype) for row in (0, 1)] if residuals and coded else [],
            residual_row=tensor("residual_row", 1 if coded else 0, torch.int64),
            states=tensor("states", 3, torch.int64),
            parts=scheme.parts,
        )

    # -- worker ---------------------------------------------------------------------------------------------

    def put_commit(self, commit: Commit) -> None:
        """Write a commit. It counts only once its message is in the pipe."""
        value = self.value[: commit.value.numel()]
        if value.numel() and commit.value.data_ptr() != value.data_ptr():
            value.copy_(commit.value)
        for name, vector in commit.also.items():
            self.also[name][: vector.numel()].copy_(vector)
        if commit.buffers is not None:
            self.buffers.copy_(commit.buffers)
        if commit.integers is not None:
            self.integers.copy_(commit.integers)
        self.commit.put(COMMIT.arguments(commit))
        if self.residuals:
            self.residual_row[0] = self._row(commit.residual) or 0
        self.brought = commit.state

    def is_answered(self, sequence: int) -> bool:
        """Return whether the reply to that commit, or to joining if negative, has arrived."""
        return int(self.answered[0]) == sequence

    def get_reply(self, value: Vector) -> Reply:
        """Return the reply, with this vector as its value."""
        return Reply(
            value=value,
            buffers=self.reply_buffers,
            integers=self.reply_integers,
            residual=self.residuals[int(self.residual_row[0])] if self.residuals else None,
            state=self.handed,
            **self.reply.get(),
        )

    # -- center ---------------------------------------------------------------------------------------------

    def get_commit(self) -> Commit:
        """Return the commit that the worker has written."""
        found = self.commit.get()
        size = self.size_of(found["part"])
        return Commit(
            value=self.value[:size],
            also={name: vector[:size] for name, vector in self.also.items()},
            buffers=self.buffers if self.buffers.numel() else None,
            integers=self.integers if self.integers.numel() else None,
            residual=self.residuals[int(self.residual_row[0])] if self.residuals else None,
            state=self.brought,
            **found,
        )

    def size_of(self, part: int) -> int:
        """Return the number of values in a fragment of the vector."""
        length = self.value.numel()
        return length * (part + 1) // self.parts - length * part // self.parts

    def put_reply(self, reply: Reply) -> None:
        """Write a reply, its sequence last: that announces it."""
        if reply.buffers is not None and reply.buffers.numel():
            self.reply_buffers.copy_(reply.buffers)
        if reply.integers is not None and reply.integers.numel():
            self.reply_integers.copy_(reply.integers)
        if self.residuals and reply.sequence < 0:
            self.put_residual(reply.residual)
        self.handed = reply.state
        self.reply.put(REPLY.arguments(reply))
        self.answered[0] = reply.sequence

    def put_residual(self, residual: Vector | None) -> None:
        """Write the residual for a worker that joins; usually it is in one of the rows already."""
        row = self._row(residual)
        if row is None:
            row = 0
            self.residuals[0].copy_(torch.zeros(()) if residual is None else residual)
        self.residual_row[0] = row

    def _row(self, residual: Vector | None) -> int | None:
        if residual is None:
            return None
        return next((row for row in (0, 1) if residual.data_ptr() == self.residuals[row].data_ptr()), None)
