"""The replicas of all workers in this process: computed together if the model allows it, otherwise one after another."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from paragrad.core.job import Job
from paragrad.core.replica import Replica, Untrained
from paragrad.core.worker import Window, progress_of, run_window
from paragrad.data.source import example
from paragrad.errors import ParagradError, WorkerError
from paragrad.learners.learner import Recovers, WarmsUp, load_marked, marked, unmarked
from paragrad.learners.rowmodel import Batchable
from paragrad.learners.rows import Task, TorchRows
from paragrad.learners.stepper import Precision
from paragrad.types import Done, Vector


@dataclass(slots=True)
class PendingWindow:
    """A window that has begun in the simulation; it must be computed before it ends there."""

    me: Replica
    request: Window
    done: Done | None = None


class SeparateReplicas:
    """One learner per worker; their windows run one after another.

    The inputs of a window are fixed when it begins, so it can be computed at any time.
    """

    def __init__(self, job: Job, workers: int, device: str) -> None:
        self._job = job
        self._make = partial(job.make_learner, device)
        self._learners = [self._make() for _ in range(workers)]
        self.device = self._learners[0].weights.device

    def weights(self, rank: int) -> Vector:
        """Return a worker's weights."""
        return self._learners[rank].weights

    def out(self, rank: int) -> Vector | None:
        """Return the vector for a worker's gradients; None if it needs no separate one."""
        return None

    def untrained(self, rank: int) -> Untrained:
        """Return a worker's state besides its weights."""
        return Untrained(self._learners[rank].buffers, self._learners[rank].integers)

    def warm_up(self) -> None:
        """Do one-time work before the start barrier, so that the first step need not."""
        first = self._learners[0]
        if isinstance(first, WarmsUp):
            first.warm_up(example(self._job.train, self._job.plan))

    def compute(self, due: Sequence[PendingWindow]) -> None:
        """Compute these windows, each of a different worker."""
        job = self._job
        for window in due:
            rank = window.me.rank
            try:
                window.done = run_window(job.scheme, window.me, self._learners[rank], job.train, job.plan, window.request)
            except ParagradError:
                raise
            except Exception as error:
                raise WorkerError(rank, traceback.format_exc()) from error

    def state(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the state of a worker's optimiser."""
        return marked(self._learners[rank], self._learners[rank].state())

    def load(self, rank: int, state: Mapping[str, torch.Tensor]) -> bool:
        """Load the state of a worker's optimiser. Return False, without a change, if it is of another optimiser."""
        return load_marked(self._learners[rank], state)

    def begin_anew(self, rank: int) -> None:
        """Prepare a replacement of a lost worker, with a new optimiser."""
        self._learners[rank] = self._make()

    def recover(self, rank: int) -> None:
        """Reset a worker's optimiser after NaN."""
        learner = self._learners[rank]
        if isinstance(learner, Recovers):
            learner.recover()

    def scatter(self, rank: int) -> None:
        """Move a worker's weights to its random starting point."""
        self._job.scatter(self._learners[rank], rank)

    def close(self) -> None:
        """Release the memory after the run."""


class BatchedReplicas:
    """All replicas as rows of one tensor, stepped together. The methods are those of ``SeparateReplicas``."""

    def __init__(
        self, job: Job, learner: Batchable, workers: int, device: str, *, precision: Precision, chunk: int | None
    ) -> None:
        self._job = job
        self._learner = learner
        self.rows = TorchRows(
            learner,
            workers,
            job.train,
            job.plan,
            device=device,
            gradients=job.scheme.ships == "gradient",
            measured=job.scheme.early is not None,
            precision=precision,
            chunk=chunk,
        )
        self.device = self.rows.weights.device

    def weights(self, rank: int) -> Vector:
        return self.rows.weights[rank]

    def out(self, rank: int) -> Vector | None:
        return None if self.rows.gradients is None else self.rows.gradients[rank]

    def untrained(self, rank: int) -> Untrained:
        return Untrained(self.rows.buffers[rank], self.rows.integers[rank])

    def warm_up(self) -> None:
        self.rows.warm_up()

    def compute(self, due: Sequence[PendingWindow]) -> None:
        tasks = [Task(window.me.rank, window.request.batches, self._progress(window.request)) for window in due]
        for window, done in zip(due, self.rows.run(tasks), strict=True):
            window.done = done
            if self.rows.gradients is not None and window.me.measures(done.steps):
                done.gradient_norm = float(torch.linalg.vector_norm(window.me.gradient))

    def _progress(self, request: Window) -> tuple[float, ...]:
        if not self.rows.paced:
            return ()
        return tuple(progress_of(self._job.scheme, request, step, self._job.plan) for step in range(len(request.batches)))

    def state(self, rank: int) -> dict[str, torch.Tensor]:
        return marked(self._learner, self.rows.state(rank))

    def load(self, rank: int, state: Mapping[str, torch.Tensor]) -> bool:
        mine = unmarked(self._learner, state)
        if mine:
            self.rows.load(rank, mine)
        return mine is not None

    def begin_anew(self, rank: int) -> None:
        self.rows.forget(rank)

    def recover(self, rank: int) -> None:
        self.rows.forget(rank)

    def scatter(self, rank: int) -> None:
        self.rows.scatter(rank, self._job.scatter_seed(rank))

    def close(self) -> None:
        self.rows.close()


Replicas: TypeAlias = SeparateReplicas | BatchedReplicas
