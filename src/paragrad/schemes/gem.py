"""GEM: gradient energy matching; all workers together move the center only as fast as one worker would."""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.core.replica import Replica
from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import Commit, Reply, SchemePlan, Vector

FEW = 16
"""Least number of windows per worker with an optimiser that has momentum."""
MOMENTS = ("adam", "adamw", "adamax", "nadam", "radam")
"""Optimisers that have momentum by default."""


@dataclass(frozen=True)
class GEM(Scheme):
    """u = w - a;  p <- μ p + u;  π = clip((κ|p| - |c - c'|) / (|u| + ε), 0, 5);  c <- c + π u;  w <- c + π u.

    The worker pulls c just before the commit; c' is the one pulled before the last commit (at first: its starting point). So
    c - c' is the movement of all workers, and p approximates the movement of one worker alone. Hermans, Louppe, *Gradient
    Energy Matching for Distributed Asynchronous Gradient Descent* (2018), arXiv:1805.08469 (the code of the paper divides by
    |u + ε|, which may be 0).

    Choose it if the number of workers is large or unknown, and stability matters more than speed.
    Not with Adam, many workers and momentum=0.9: the proxy is a momentum, and Adam has its own; take momentum=0. Nor for one
    worker, whose commits are scaled as well.
    """

    momentum: float = 0.9
    """μ: decay of the proxy p, which remembers the movements of one worker."""
    kappa: float = 2.0
    """κ: largest movement of all workers together, relative to that of a single worker."""
    epsilon: float = 1e-12
    """Avoids a division by 0 for elements that did not move."""
    clip: float = 5.0
    """Largest factor π of an element."""

    pulls = "commit"
    elementwise = True
    worker_slots = ("proxy", "pulled")
    adopts_from = ("sent", "center")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum={self.momentum}, but the proxy needs 0 <= momentum < 1.")
        if not (self.kappa > 0 and self.epsilon > 0 and self.clip > 0):
            raise UsageError(
                f"kappa={self.kappa}, epsilon={self.epsilon}, clip={self.clip}, but GEM needs all three above 0: otherwise "
                "commits would be 0 or NaN."
            )

    def warnings(self, plan: SchemePlan) -> list[str]:
        rounds, enough = plan.rounds(self.window), max(FEW, 2 * plan.workers)
        if not self.momentum or plan.optimizer not in MOMENTS or plan.workers == 1 or rounds >= enough:
            return []
        return [
            f"GEM with {plan.workers} workers, momentum={self.momentum} and {plan.optimizer} (with its own momentum) moves "
            f"the center too far in a run of {rounds:.3g} windows per worker. Take momentum=0, or at least {enough} windows."
        ]

    def begin(self, me: Replica) -> None:
        if me.anchor is me.center:  # the worker starts at the center: at the beginning, or after a rejected commit
            me.slots["pulled"] = me.center

    def commit(self, me: Replica) -> Vector:
        update, proxy = me.movement(), me.slots["proxy"]
        proxy.mul_(self.momentum).add_(update)
        energy = self.kappa * proxy.abs() - (me.center - me.slots["pulled"]).abs()
        me.slots["pulled"] = me.center
        return (energy / (update.abs() + self.epsilon)).clamp(0, self.clip) * update

    def scale(self, commit: Commit) -> float:
        return 1.0

    def adopt(self, me: Replica, reply: Reply) -> None:
        if me.sent is not None:
            me.local = me.anchor = me.center + me.sent
