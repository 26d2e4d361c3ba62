"""A quadratic problem that is small enough for exact tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from paragrad.data.source import Source
from paragrad.learners.learner import Step
from paragrad.types import Vector

SIZE = 7


@dataclass
class Bowl:
    """A learner without a network: f(w) = mean over rows of ½ Σ hⱼ (wⱼ - xⱼ)², with plain SGD in float64."""

    lr: float = 0.05
    weights: Vector = field(default_factory=lambda: torch.linspace(-1.0, 2.0, SIZE, dtype=torch.float64))
    buffers: Vector = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    integers: Vector = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    curvature: Vector = field(default_factory=lambda: torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64))

    def _slope(self, batch: Any) -> tuple[Vector, Step]:
        gap = self.weights - batch
        loss = float((0.5 * self.curvature * gap**2).sum(1).mean())
        return (self.curvature * gap).mean(0), Step(loss, float(len(batch)))

    def step(self, batch: Any) -> Step:
        slope, step = self._slope(batch)
        self.weights.sub_(self.lr * slope)
        return step

    def gradient(self, batch: Any, out: Vector, accumulate: float = 0.0) -> Step:
        slope, step = self._slope(batch)
        out.copy_(slope if not accumulate else torch.lerp(out, slope, step.weight / (accumulate + step.weight)))
        return step

    def evaluate(self, source: Source, batch_size: int) -> dict[str, float]:
        return {"loss": self._slope(source.batch(torch.arange(len(source)).numpy()))[1].loss}

    def center_optimizer(self, device: str = "cpu") -> _Descent:
        return _Descent(self.lr)

    aliasable: bool = True

    def alias(self, vector: Vector) -> None:
        self.weights = vector

    def scatter(self, seed: int) -> None:
        self.weights.copy_(torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))

    def spread(self) -> bool:
        return False

    def collect(self) -> None:
        pass

    def check(self) -> None:
        pass

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        pass


class Faulty(Bowl):
    """A bowl with a faulty step: the third is NaN, or the first raises an error, before any commit."""

    MESSAGE = "this worker fails on purpose"

    def __init__(self, how: Literal["nan", "raise"]) -> None:
        super().__init__()
        self.how = how
        self.made = 0

    def _slope(self, batch: Any) -> tuple[Vector, Step]:
        slope, step = super()._slope(batch)
        self.made += 1
        if self.how == "raise":
            raise ValueError(self.MESSAGE)
        return slope * (math.nan if self.made == 3 else 1.0), step


@dataclass
class _Descent:
    """Plain SGD at the center."""

    lr: float

    def step(self, vector: Vector, gradient: Vector, scale: float = 1.0) -> None:
        vector.sub_(self.lr * scale * gradient)

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        pass
