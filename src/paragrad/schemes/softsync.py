"""SoftSync: the center steps on the mean of some gradients, each divided by its staleness; workers do not wait."""

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

    wᵢ is the normaliser of the loss. An optimiser other than plain SGD gets the weighted mean of the gradients, and the mean of
    1 / max(1, τ) scales its *step*, because Adam would undo a scaled gradient. Zhang, Gupta, Lian, Liu, *Staleness-aware
    Async-SGD for Distributed Deep Learning* (IJCAI 2016), arXiv:1511.05950.

    Choose it if workers differ in speed and the center should have the optimiser: s = 1 is nearly synchronous, s = n steps on
    every gradient.
    Not if a run must be reproducible to the bit: it depends on the order of arrival. Take SyncSGD.
    """

    splits: int = 1
    """s: steps of the center per n gradients."""

    ships = "gradient"
    held = False
    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_window_is_1()
        if self.splits < 1:
            raise UsageError(f"splits={self.splits}, but the center makes at least 1 step per n gradients.")

    def quorum(self, workers: int) -> int:
        if self.splits > workers:
            raise UsageError(
                f"splits={self.splits} with workers={workers} leaves less than one gradient per step: "
                f"splits can be 1 to {workers}."
            )
        return workers // self.splits

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        aged = [changed(commit, weight=commit.weight / max(1, commit.staleness)) for commit in commits]
        total = sum(commit.weight for commit in commits)
        share = sum(commit.weight for commit in aged) / total if total else 1.0
        center.step(center.mean(aged), share)
        return center.value
