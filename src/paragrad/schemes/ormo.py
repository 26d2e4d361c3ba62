"""OrMo: asynchronous SGD with momentum, in which every gradient counts as if it had arrived in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Vector


@dataclass(frozen=True)
class OrMo(Scheme):
    """u <- β u, c <- c - u at every n-th commit;  then u <- u + β^b η g, c <- c - (1 + ... + β^b) η g;  the worker takes c.

    b is the delay of g in buckets of n gradients: ⌊t / n⌋ - ⌈v / n⌉ (at least 0), with t the clock and v the clock at which g
    was taken. Shi, Yang, Li, *Ordered Momentum for Asynchronous SGD* (NeurIPS 2024), arXiv:2407.19234. One worker is torch's
    SGD with momentum (at a constant learning rate). Gradients that arrive in rounds are synchronous SGD with momentum on their
    sum. The scheme makes the step itself, with the learning rate of the learner, so that the optimiser must be plain SGD.

    Choose it for momentum without waiting.
    Not with the learning rate of a single worker: a bucket adds the gradients of all n, so divide it by n.
    Nor with Adam or weight decay: take StalenessAware.
    """

    momentum: float = 0.9
    """β."""

    ships = "gradient"
    center_slots = ("momentum",)
    elementwise = True
    plain_sgd = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum={self.momentum}, but OrMo needs 0 <= momentum < 1.")

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        beta, bucket, momentum = self.momentum, center.workers, center.slots["momentum"]
        for clock, commit in enumerate(commits, start=center.clock):
            if not commit.lr >= 0:
                raise UsageError(
                    f"OrMo needs the optimiser's learning rate, which is {commit.lr}. Take an optimiser that has an lr."
                )
            if clock % bucket == 0:
                momentum.mul_(beta)
                center.add(momentum, -1.0)
            # If a worker commits twice in one bucket, its gradient is ahead of its own bucket and joins the open one.
            behind = max(0, clock // bucket + -commit.version // bucket)
            momentum.add_(commit.value, alpha=beta**behind * commit.lr)
            center.add(commit.value, -sum(beta**k for k in range(behind + 1)) * commit.lr)
        return center.value
