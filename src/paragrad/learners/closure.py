"""The closure for optimisers that evaluate one mini-batch several times per step, as a line search does."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paragrad.core.flat import Flat
from paragrad.data import seeds
from paragrad.errors import UsageError
from paragrad.learners.learner import Step
from paragrad.types import Vector


class RandomState:
    """Current state of the random generators of torch, NumPy and Python."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._on_device = None if self._cuda is None else torch.cuda.get_rng_state(self._cuda)
        self._on_host = seeds.states()

    def restore(self) -> None:
        """Reset the generators, so that the same numbers are drawn again."""
        seeds.restore(self._on_host)
        if self._cuda is not None and self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._cuda)


class Closure:
    """Evaluates a mini-batch; every evaluation draws the same random numbers and starts from the same buffers.

    Batch-norm statistics are updated once, as by any other step: by the first evaluation, at the start of the step.
    """

    def __init__(
        self, evaluate: Callable[[], Step], collect: Callable[[], None], stateful: list[Flat], device: torch.device
    ) -> None:
        self._evaluate = evaluate
        self._collect = collect
        self._stateful = [flat for flat in stateful if flat.vector.numel()]
        self._random = RandomState(device)
        self._before = self._copy()
        self._after: list[Vector] = []
        self._first: Step | None = None

    def __call__(self) -> float:
        """Run the forward and backward pass; return the loss."""
        if self._first is not None:
            self._random.restore()
            self._put(self._before)
        step = self._evaluate()
        if self._first is None:
            self._first, self._after = step, self._copy()
        return step.loss

    def finish(self, name: str) -> Step:
        """Return the result of the first evaluation and keep its buffers; ``name`` is the optimiser's, for messages."""
        if self._first is None:
            raise UsageError(f"{name}.step(closure) never called its closure, so nothing was trained.")
        self._put(self._after)
        return self._first

    def _copy(self) -> list[Vector]:
        if self._stateful:
            self._collect()
        return [flat.vector.clone() for flat in self._stateful]

    def _put(self, vectors: list[Vector]) -> None:
        if self._stateful:
            self._collect()  # a forward pass may have replaced a buffer by a new tensor
        for flat, vector in zip(self._stateful, vectors, strict=True):
            flat.vector.copy_(vector)
            flat.spread()
