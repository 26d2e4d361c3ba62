"""A worker's own corner of the shared memory: its commit on the way out, its answer on the way back."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

import torch

from paragrad.job import Job
from paragrad.learners.learner import Learner
from paragrad.state import Allocate
from paragrad.types import Batches, Commit, Reply, Vector
from paragrad.worker import DRAWN


class Op(IntEnum):
    """What a message in the shared pipe says."""

    READY = 1
    """The worker has warmed up; also the marker behind which a replacement may use its predecessor's slot."""
    COMMIT = 2
    LEFT = 3


MESSAGE = struct.Struct("<HHIQ")
"""(worker, operation, incarnation, sequence): 16 bytes, below PIPE_BUF, so that one write is all or nothing."""

ANSWERED, SEQUENCE, VERSION, STEPS, ROWS, PART, INCARNATION, SAW, COUNT = range(9)
R_VERSION, R_STEPS, R_APPLIED, R_PLACED, R_DONE, R_LAST, R_COUNT = range(9, 16)
WEIGHT, LOSS, LR, SECONDS, DISTANCE, R_PROGRESS = range(6)


@dataclass
class Slot:
    """The tensors of one worker; written by one side at a time: the worker until its message, then the center."""

    worker: int
    numbers: torch.Tensor
    floats: torch.Tensor
    value: Vector
    also: dict[str, Vector]
    buffers: Vector
    integers: Vector
    batches: torch.Tensor
    pulls: torch.Tensor
    """How many, and their clocks."""
    path: torch.Tensor
    reply_batches: torch.Tensor
    reply_buffers: Vector
    reply_integers: Vector
    residuals: list[Vector]
    """What a codec leaves out: two rows, of which a worker reads one and writes the other. None without a codec, nor where a
    worker keeps them to itself."""
    coding: torch.Tensor
    """With a codec: which of the rows was written last, and the bytes of the coded commit."""

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
        """Allocate, or, with a segment's ``tensor`` for ``allocate``, open, the slot of a worker. ``residuals``: a codec's
        lie in it, too. ``part``: it is for so many of the first values."""
        scheme, like, coded = job.scheme, learner.weights[:part], job.codec is not None

        def tensor(name: str, length: int, dtype: torch.dtype) -> torch.Tensor:
            return allocate(f"slot{worker}.{name}", length, dtype)

        length = 0 if scheme.aliased or by_reference else like.numel()
        return cls(
            worker=worker,
            numbers=tensor("numbers", 16, torch.int64),
            floats=tensor("floats", 8, torch.float64),
            value=tensor("value", length, like.dtype),
            also={name: tensor(f"also.{name}", length, like.dtype) for name in scheme.sends},
            buffers=tensor("buffers", learner.buffers.numel(), like.dtype),
            integers=tensor("integers", learner.integers.numel(), torch.int64),
            batches=tensor("batches", window, torch.int64),
            pulls=tensor("pulls", 2 + (window // scheme.fetch + 1 if scheme.fetch else 0), torch.int64),
            path=tensor("path", 2 * like.numel() if like.numel() <= DRAWN and not scheme.aliased else 0, torch.float64),
            reply_batches=tensor("reply_batches", window, torch.int64),
            reply_buffers=tensor("reply_buffers", learner.buffers.numel(), like.dtype),
            reply_integers=tensor("reply_integers", learner.integers.numel(), torch.int64),
            residuals=[tensor(f"residual{row}", length, like.dtype) for row in (0, 1)] if residuals and coded else [],
            coding=tensor("coding", 2 if coded else 0, torch.int64),
        )

    # -- the worker's side ----------------------------------------------------------------------------------

    def put_commit(self, commit: Commit) -> None:
        """Lay out a commit; nothing counts until the message is in the pipe."""
        value = self.value[: commit.value.numel()]
        if value.numel() and commit.value.data_ptr() != value.data_ptr():
            value.copy_(commit.value)
        for name, vector in commit.also.items():
            self.also[name][: vector.numel()].copy_(vector)
        if commit.buffers is not None:
            self.buffers.copy_(commit.buffers)
        if commit.integers is not None:
            self.integers.copy_(commit.integers)
        count = len(commit.batches)
        self.batches[:count] = torch.tensor(commit.batches, dtype=torch.int64)
        self.numbers[SEQUENCE:R_VERSION] = torch.tensor(
            [commit.sequence, commit.version, commit.steps, commit.rows, commit.part, commit.incarnation, commit.saw, count]
        )
        floats = [commit.weight, commit.loss, commit.lr, commit.seconds, commit.distance]
        self.floats[:R_PROGRESS] = torch.tensor(floats, dtype=torch.float64)
        if commit.pulls or int(self.pulls[0]):
            self.pulls[: 1 + len(commit.pulls)] = torch.tensor([len(commit.pulls), *commit.pulls])
        if self.path.numel():
            path = commit.path
            self.path.copy_(torch.tensor(math.nan if path is None else path, dtype=torch.float64).view(-1))
        if self.coding.numel():
            row = self._row(commit.residual) if self.residuals else None
            self.coding.copy_(torch.tensor([row or 0, commit.coded_bytes or 0]))

    def answered(self, sequence: int) -> bool:
        """Whether the answer to that commit (or, below 0, to joining) is there."""
        return int(self.numbers[ANSWERED]) == sequence

    def get_reply(self, value: Vector) -> Reply:
        """The answer, with the vector that goes with it."""
        version, steps, applied, placed, done, last, count = self.numbers[R_VERSION : R_COUNT + 1].tolist()
        return Reply(
            worker=self.worker,
            sequence=int(self.numbers[ANSWERED]),
            version=version,
            value=value,
            steps=steps,
            batches=tuple(self.reply_batches[:count].tolist()),
            applied=bool(applied),
            placed=bool(placed),
            done=bool(done),
            last=last,
            progress=float(self.floats[R_PROGRESS]),
            buffers=self.reply_buffers,
            integers=self.reply_integers,
            residual=self.residuals[int(self.coding[0])] if self.residuals else None,
        )

    # -- the center's side ----------------------------------------------------------------------------------

    def get_commit(self, parts: int) -> Commit:
        """The commit as it was laid out."""
        sequence, version, steps, rows, part, incarnation, saw, count = self.numbers[SEQUENCE:R_VERSION].tolist()
        weight, loss, lr, seconds, distance = self.floats[:R_PROGRESS].tolist()
        pulls = int(self.pulls[0])
        path = self.path.tolist()
        half = len(path) // 2
        length = self.value.numel()
        size = length * (part + 1) // parts - length * part // parts
        batches: Batches = tuple(self.batches[:count].tolist())
        return Commit(
            worker=self.worker,
            sequence=sequence,
            version=version,
            value=self.value[:size],
            also={name: vector[:size] for name, vector in self.also.items()},
            steps=steps,
            incarnation=incarnation,
            buffers=self.buffers if self.buffers.numel() else None,
            integers=self.integers if self.integers.numel() else None,
            weight=weight,
            rows=rows,
            batches=batches,
            loss=loss,
            lr=lr,
            seconds=seconds,
            part=part,
            pulls=tuple(self.pulls[1 : 1 + pulls].tolist()) if pulls else (),
            saw=saw,
            distance=distance,
            path=(tuple(path[:half]), tuple(path[half:])) if path and not math.isnan(path[0]) else None,
            coded_bytes=int(self.coding[1]) if self.coding.numel() else None,
            residual=self.residuals[int(self.coding[0])] if self.residuals else None,
        )

    def put_reply(self, reply: Reply) -> None:
        """Lay out an answer; the number that says so is written last."""
        count = len(reply.batches)
        self.reply_batches[:count] = torch.tensor(reply.batches, dtype=torch.int64)
        if reply.buffers is not None and reply.buffers.numel():
            self.reply_buffers.copy_(reply.buffers)
        if reply.integers is not None and reply.integers.numel():
            self.reply_integers.copy_(reply.integers)
        if self.residuals and reply.sequence < 0:
            self.put_residual(reply.residual)
        self.floats[R_PROGRESS] = reply.progress
        self.numbers[R_VERSION : R_COUNT + 1] = torch.tensor(
            [reply.version, reply.steps, int(reply.applied), int(reply.placed), int(reply.done), reply.last, count]
        )
        self.numbers[ANSWERED] = reply.sequence

    def put_residual(self, residual: Vector | None) -> None:
        """Where a newcomer finds what its predecessors' commits have left out: as a rule in the row that it lies in already."""
        row = self._row(residual)
        if row is None:
            row = 0
            self.residuals[0].copy_(torch.zeros(()) if residual is None else residual)
        self.coding[0] = row

    def _row(self, residual: Vector | None) -> int | None:
        if residual is None:
            return None
        return next((row for row in (0, 1) if residual.data_ptr() == self.residuals[row].data_ptr()), None)
