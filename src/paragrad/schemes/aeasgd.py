"""AEASGD: asynchronous elastic averaging; an elastic force ties each worker to the center."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paragrad.core.replica import Replica
from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Reply, SchemePlan, Vector


@dataclass(frozen=True)
class AEASGD(Scheme):
    """e = α (w - c);  c <- c + e;  w <- w - e.

    Zhang, Choromanska, LeCun, *Deep learning with Elastic Averaging SGD* (NIPS 2015). With ``atomic=True`` the center makes
    all three updates at once, which is stable for every n while α <= 1. In the thesis (Hermans 2017), the worker pulls c,
    computes e, then commits it (``atomic=False``): with n workers between pull and commit, this diverges for α (n + 1) >= 2.

    Choose it if workers should explore and communicate rarely (windows of 10 or more).
    Not if the center must follow the workers closely: it moves only by α of the distance.
    """

    window: int = 10
    alpha: float = 0.1
    """Share of the distance that worker and center each move at an exchange."""
    atomic: bool = True
    """The center computes the force; False: the worker does, from a center that it pulled before (as in the thesis)."""

    elementwise = True
    answers = "own"
    carries = True
    adopts_from = ("local",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha <= 1:
            raise UsageError(f"alpha={self.alpha}, but the elastic force is stable only for 0 < alpha <= 1.")

    @property
    def pulls(self) -> Literal["commit"] | None:
        return None if self.atomic else "commit"

    @property
    def ships(self) -> Literal["movement", "gradient", "weights"]:
        return "weights" if self.atomic else "movement"

    def commit(self, me: Replica) -> Vector:
        return me.local if self.atomic else self.alpha * (me.local - me.center)

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> list[Vector]:
        forces = []
        for commit in commits:
            if self.atomic:
                forces.append(center.approach(commit.value, self.alpha))
            else:
                center.add(commit.value)
                forces.append(commit.value)
        return forces

    def adopt(self, me: Replica, reply: Reply) -> None:
        me.local -= reply.value

    def warnings(self, plan: SchemePlan) -> list[str]:
        workers = plan.workers
        if not self.atomic and self.alpha * (workers + 1) >= 2:
            return [
                f"AEASGD(atomic=False) with alpha={self.alpha} and {workers} workers has alpha * (workers + 1) = "
                f"{self.alpha * (workers + 1):.2f} >= 2 and is known to diverge. Take alpha below {2 / (workers + 1):.3f}, or "
                "atomic=True, which is stable with any number of workers."
            ]
        return []
