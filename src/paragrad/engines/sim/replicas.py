"""All workers' replicas in this process: computed together where their model allows it, else one after another."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paragrad.core.job import Job
from paragrad.core.replica import Replica
from paragrad.core.worker import Window, progress_of, run_window
from paragrad.data.source import example
from paragrad.errors import ParagradError, WorkerError
from paragrad.learners.learner import Learner, Recovers, WarmsUp, load_marked, marked, unmarked
from paragrad.learners.rowmodel import Batchable
from paragrad.learners.rows import Task, TorchRows
from paragrad.learners.stepper import Precision
from paragrad.types import Done, Vector


@dataclass(slots=True)
class PendingWindow:
    """A window that has begun in the simulation, and must be computed before it ends there."""

    me: Replica
    request: Window
    done: Done | None = None


class Replicas(Protocol):
    """The replicas of all workers. A window is *closed* when it begins: whenever it is computed, the result is the same."""

    @property
    def device(self) -> torch.device:
        """Where the vectors lie."""

    def weights(self, rank: int) -> Vector:
        """A worker's weights."""

    def out(self, rank: int) -> Vector | None:
        """Where a worker's gradients are written; None where it ships none."""

    def buffers(self, rank: int) -> Vector:
        """A worker's floating state that is not trained."""

    def integers(self, rank: int) -> Vector:
        """A worker's integer state that is not trained."""

    def warm_up(self) -> None:
        """Do before the start barrier what only the first step would else wait for."""

    def compute(self, due: Sequence[PendingWindow]) -> None:
        """Run these windows, each of another worker."""

    def state(self, rank: int) -> dict[str, torch.Tensor]:
        """The state of a worker's optimiser."""

    def load(self, rank: int, state: Mapping[str, torch.Tensor]) -> bool:
        """The inverse; False where it is of another optimiser, and the worker begins with its own."""

    def begin_anew(self, rank: int) -> None:
        """A replacement takes a lost worker's place: it has an optimiser of its own."""

    def recover(self, rank: int) -> None:
        """A worker's optimiser has seen NaN."""

    def scatter(self, rank: int) -> None:
        """Move a worker to a random point of its own."""

    def close(self) -> None:
        """The run is over."""


class SeparateReplicas:
    """A learner for each worker; their windows run one after another, as in any other engine."""

    def __init__(self, job: Job, workers: int, device: str) -> None:
        self._job = job
        self._make: Callable[[], Learner] = lambda: job.make_learner(device)
        self._learners = [self._make() for _ in range(workers)]
        self.device = self._learners[0].weights.device

    def weights(self, rank: int) -> Vector:
        return self._learners[rank].weights

    def out(self, rank: int) -> Vector | None:
        return None

    def buffers(self, rank: int) -> Vector:
        return self._learners[rank].buffers

    def integers(self, rank: int) -> Vector:
        return self._learners[rank].integers

    def warm_up(self) -> None:
        first = self._learners[0]
        if isinstance(first, WarmsUp):
            first.warm_up(example(self._job.train, self._job.plan))

    def compute(self, due: Sequence[PendingWindow]) -> None:
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
        return marked(self._learners[rank], self._learners[rank].state())

    def load(self, rank: int, state: Mapping[str, torch.Tensor]) -> bool:
        return load_marked(self._learners[rank], state)

    def begin_anew(self, rank: int) -> None:
        self._learners[rank] = self._make()

    def recover(self, rank: int) -> None:
        learner = self._learners[rank]
        if isinstance(learner, Recovers):
            learner.recover()

    def scatter(self, rank: int) -> None:
        self._job.scatter(self._learners[rank], rank)

    def close(self) -> None:
        pass


class BatchedReplicas:
    """Rows of one tensor, stepped at once."""

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

    def buffers(self, rank: int) -> Vector:
        return self.rows.buffers[rank]

    def integers(self, rank: int) -> Vector:
        return self.rows.integers[rank]

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
