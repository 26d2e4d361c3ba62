"""DiLoCo: long local windows, then one outer Nesterov step on the mean movement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Vector


@dataclass(frozen=True)
class DiLoCo(Scheme):
    """Δ = mean(c - wᵢ);  v <- μ v + Δ;  c <- c - η (Δ + μ v);  every worker takes c.

    Douillard et al., *DiLoCo: Distributed Low-Communication Training of Language Models* (2023),
    arXiv:2311.08105. Inner optimiser state stays with its worker. DiLoCo(lr=1, momentum=0) is model averaging.

    Choose it with AdamW inside and windows of 30 to 500 steps, where links are slow.
    Not for short runs of a few windows: the outer momentum needs rounds to build up.
    """

    window: int = 50
    lr: float = 0.7
    """The outer learning rate."""
    momentum: float = 0.9
    """The outer Nesterov momentum."""

    center_slots = ("velocity",)
    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr <= 0 or not 0 <= self.momentum < 1:
            raise UsageError(f"lr={self.lr}, momentum={self.momentum}, but DiLoCo needs lr > 0 and 0 <= momentum < 1.")
        if self.bound is not None:
            raise UsageError("DiLoCo is synchronous: a bound on staleness has no meaning, leave it out.")

    def quorum(self, workers: int) -> int:
        return workers

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        delta = -torch.stack([commit.value for commit in commits]).mean(0)
        velocity = center.slots["velocity"]
        velocity.mul_(self.momentum).add_(delta)
        center.add(delta + self.momentum * velocity, -self.lr)
        return center.value
