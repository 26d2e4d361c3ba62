"""SyncSGD: synchronous data parallelism; n workers are one process with an n times larger batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.schemes.scheme import Synchronous
from paragrad.types import CenterView, Commit, Vector


@dataclass(frozen=True)
class SyncSGD(Synchronous):
    """g = Σ wᵢ gᵢ / Σ wᵢ;  c <- one step of the optimiser on g;  every worker takes c.

    wᵢ is the normaliser of the loss (rows, or the sum of class weights), so that the result equals that of one process with the
    whole batch, for every optimiser. Chen et al., *Revisiting Distributed Synchronous SGD* (2016), arXiv:1604.00981.

    Choose it if workers are equally fast and the result must equal plain training.
    Not if one worker is slow: all wait for it at every step.
    """

    ships = "gradient"
    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_window_is_1()

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        center.step(center.mean(commits))
        return center.value
