"""One mini-batch looked at several times for one step, as optimisers that search along a line do."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch

from paragrad.core.flat import Flat
from paragrad.errors import UsageError
from paragrad.learners.learner import Step
from paragrad.types import Vector


class Draws:
    """Where the generators of torch, NumPy and Python are now; ``again`` goes back there."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._torch = torch.get_rng_state()
        self._on_device = None if self._cuda is None else torch.cuda.get_rng_state(self._cuda)
        self._numpy = np.random.get_state()
        self._python = random.getstate()

    def again(self) -> None:
        """What was drawn since is drawn once more."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None and self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._cuda)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


class Looks:
    """The closure of such an optimiser: every look draws the same random numbers and begins from the same buffers.

    Batch-norm statistics are moved once, as by any other step: by the first look, where the step begins.
    """

    def __init__(
        self, look: Callable[[], Step], collect: Callable[[], None], stateful: list[Flat], device: torch.device
    ) -> None:
        self._look = look
        self._collect = collect
        self._stateful = [flat for flat in stateful if flat.vector.numel()]
        self._draws = Draws(device)
        self._before = self._copied()
        self._after: list[Vector] = []
        self._first: Step | None = None

    def __call__(self) -> float:
        """Forward and backward; the loss."""
        if self._first is not None:
            self._draws.again()
            self._put(self._before)
        step = self._look()
        if self._first is None:
            self._first, self._after = step, self._copied()
        return step.loss

    def settled(self, name: str) -> Step:
        """After the step of the optimiser of that name: what the first look came to."""
        if self._first is None:
            raise UsageError(f"{name}.step(closure) never called its closure, so that nothing was trained.")
        self._put(self._after)
        return self._first

    def _copied(self) -> list[Vector]:
        if self._stateful:
            self._collect()
        return [flat.vector.clone() for flat in self._stateful]

    def _put(self, vectors: list[Vector]) -> None:
        if self._stateful:
            self._collect()  # a forward pass may have put a new tensor into a buffer's place
        for flat, vector in zip(self._stateful, vectors, strict=True):
            flat.vector.copy_(vector)
            flat.spread()
