"""DiLoCo: long local windows, then one outer Nesterov step on the mean movement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paragrad.errors import UsageError
from paragrad.schemes.scheme import Synchronous
from paragrad.types import CenterView, Commit, SchemePlan, Vector

FEW = 10
"""Rounds that the outer momentum needs."""
OVERSHOOT = 1.2
"""Largest movement of the center in the first round, relative to that of the workers."""


@dataclass(frozen=True)
class DiLoCo(Synchronous):
    """Δ = mean(c - wᵢ);  v <- μ v + Δ;  c <- c - η (Δ + μ v);  every worker takes c.

    Douillard et al., *DiLoCo: Distributed Low-Communication Training of Language Models* (2023), arXiv:2311.08105. Each worker
    keeps the state of its inner optimiser. DiLoCo(outer_lr=1, outer_momentum=0) is model averaging.

    Choose it for slow networks, with AdamW as inner optimiser and windows of 30 to 500 steps.
    Not for short runs of a few windows: the outer momentum needs rounds to build up.
    """

    window: int = 50
    outer_lr: float = 0.7
    """Outer learning rate."""
    outer_momentum: float = 0.9
    """Outer Nesterov momentum."""

    center_slots = ("velocity",)
    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outer_lr <= 0 or not 0 <= self.outer_momentum < 1:
            raise UsageError(
                f"outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum}, but DiLoCo needs outer_lr > 0 and "
                "0 <= outer_momentum < 1."
            )

    def warnings(self, plan: SchemePlan) -> list[str]:
        rounds, first = plan.rounds(self.window), self.outer_lr * (1 + self.outer_momentum)
        if rounds >= FEW or first <= OVERSHOOT:
            return []
        return [
            f"DiLoCo of {rounds:.2g} rounds: the first moves the center {first:.3g} times as far as the workers, and the outer "
            f"momentum needs about {FEW} rounds to settle; until then the loss may rise. "
            f"Take outer_lr={min(self.outer_lr, 0.7):g} with outer_momentum=0.5."
        ]

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        delta = -torch.stack([commit.value for commit in commits]).mean(0)
        velocity = center.slots["velocity"]
        velocity.mul_(self.outer_momentum).add_(delta)
        center.add(delta + self.outer_momentum * velocity, -self.outer_lr)
        return center.value
