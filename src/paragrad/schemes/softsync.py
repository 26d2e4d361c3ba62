"""SoftSync: the center steps on the mean of a share of the workers' gradients, each scaled by its staleness; nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as changed

from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Vector


@dataclass(frozen=True)
class SoftSync(Scheme):
    """c <- c - η Σ wᵢ gᵢ / max(1, τᵢ) / Σ wᵢ, over ⌊n/s⌋ gradients;  the worker takes c, without waiting for the step.

    wᵢ is the loss's own normaliser. Where the optimiser is not plain SGD it sees the weighted mean of the
    gradients, and the mean of 1 / max(1, τ) scales its *step*: Adam would undo a scaled gradient. Zhang, Gupta,
    Lian, Liu, *Staleness-aware Async-SGD for Distributed Deep Learning* (IJCAI 2016), arXiv:1511.05950.

    Choose it when workers differ in speed and the center shall hold the optimiser: s = 1 is nearly
    synchronous, s = n steps on every gradient.
    Not when a run must repeat to the bit: it depends on who comes first. Take SyncSGD.
    """

    splits: int = 1
    """s: the center steps s times while n gradients come in."""

    ships = "gradient"
    held = False
    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window != 1:
            raise UsageError(f"window={self.window}, but SoftSync exchanges a gradient at every step: leave window at 1.")
        if self.splits < 1:
            raise UsageError(f"splits={self.splits}, but the center steps at least 1 time for every n gradients.")

    def quorum(self, workers: int) -> int:
        if self.splits > workers:
            raise UsageError(
                f"splits={self.splits} with workers={workers} leaves less than one gradient for a step: "
                f"splits can be 1 to {workers}."
            )
        return workers // self.splits

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        aged = [changed(commit, weight=commit.weight / max(1, commit.staleness)) for commit in commits]
        total = sum(commit.weight for commit in commits)
        share = sum(commit.weight for commit in aged) / total if total else 1.0
        center.step(center.mean(aged), share)
        return center.value
