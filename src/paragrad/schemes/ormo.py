"""OrMo: asynchronous SGD with momentum, in which every gradient enters as if it had come in its turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Vector


@dataclass(frozen=True)
class OrMo(Scheme):
    """u <- β u, c <- c - u at every n-th commit;  then u <- u + β^b η g, c <- c - (1 + ... + β^b) η g;  the worker takes c.

    b is how many buckets of n gradients ago g was due: ⌊t / n⌋ - ⌈v / n⌉ (at least 0), t the clock and v the clock at
    which g was taken. Shi, Yang, Li, *Ordered Momentum for Asynchronous SGD* (NeurIPS 2024), arXiv:2407.19234. One worker
    is torch's SGD with momentum (at a constant rate); gradients that come in rounds are synchronous SGD with momentum on
    their sum. It makes the step itself, with the learner's rate: the optimiser must be plain SGD.

    Choose it where momentum is wanted and nobody should wait.
    Not at the rate of a lone worker: a bucket adds the gradients of all n, so divide it by n.
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
                    f"OrMo steps with the optimiser's rate, which is {commit.lr}. Take an optimiser that has an lr."
                )
            if clock % bucket == 0:
                momentum.mul_(beta)
                center.add(momentum, -1.0)
            # A gradient may be ahead of its bucket (a worker that commits twice in one): it joins the one that is open.
            behind = max(0, clock // bucket + -commit.version // bucket)
            momentum.add_(commit.value, alpha=beta**behind * commit.lr)
            center.add(commit.value, -sum(beta**k for k in range(behind + 1)) * commit.lr)
        return center.value
