"""SyncSGD: synchronous mini-batch parallelism; n workers are one process with an n times larger batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Vector


@dataclass(frozen=True)
class SyncSGD(Scheme):
    """g = Σ wᵢ gᵢ / Σ wᵢ;  c <- one step of the optimiser on g;  every worker takes c.

    wᵢ is the loss's own normaliser (rows, or the sum of class weights), so that the result equals one
    process with the whole batch for every optimiser. Chen et al., *Revisiting Distributed Synchronous
    SGD* (2016), arXiv:1604.00981.

    Choose it when workers are equally fast and the result must equal plain training.
    Not when one worker is slow: all wait for it, at every step.
    """

    ships = "gradient"
    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window != 1:
            raise UsageError(f"window={self.window}, but SyncSGD exchanges a gradient at every step: leave window at 1.")
        if self.bound is not None:
            raise UsageError("SyncSGD is synchronous: a bound on staleness has no meaning, leave it out.")

    def quorum(self, workers: int) -> int:
        return workers

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        center.step(center.mean(commits))
        return center.value
