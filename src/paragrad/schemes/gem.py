"""GEM: gradient energy matching; all workers together move the center only as fast as one would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.core.replica import Replica
from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Reply, SchemePlan, Vector

FEW = 16
"""Windows per worker that it takes at least, with an optimiser that has a momentum of its own."""
MOMENTS = ("adam", "adamw", "adamax", "nadam", "radam")
"""Optimisers with a momentum of their own by default."""


@dataclass(frozen=True)
class GEM(Scheme):
    """u = w - a;  p <- μ p + u;  π = clip((κ|p| - |c - c'|) / (|u| + ε), 0, 5);  c <- c + π u;  w <- c + π u.

    c is pulled just before the commit, c' was pulled before the last one (at first: what the worker began from), so
    that c - c' is the movement of all, its own included, and p what one worker alone would have. Hermans, Louppe,
    *Gradient Energy Matching for Distributed Asynchronous Gradient Descent* (2018), arXiv:1805.08469 (whose
    code divides by |u + ε|, which may be 0).

    Choose it when the number of workers is large or not known, and stability matters more than speed.
    Not with Adam, many workers and momentum=0.9: the proxy is a momentum, and Adam has one of its own; take momentum=0. Nor
    for one worker, whose commits are stretched and shrunk as well.
    """

    momentum: float = 0.9
    """How long one worker's movements are remembered in the proxy p."""
    kappa: float = 2.0
    """How many times a lone worker's movement all of them may make."""
    epsilon: float = 1e-12
    """Keeps an element that did not move from dividing by 0."""
    clip: float = 5.0
    """The most that an element is stretched."""

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
                f"kappa={self.kappa}, epsilon={self.epsilon}, clip={self.clip}, but GEM needs all three above 0: nothing "
                "would be committed, or 0 divided by 0."
            )

    def warnings(self, plan: SchemePlan) -> list[str]:
        rounds, enough = plan.rounds(self.window), max(FEW, 2 * plan.workers)
        if not self.momentum or plan.optimizer not in MOMENTS or plan.workers == 1 or rounds >= enough:
            return []
        return [
            f"GEM with {plan.workers} workers, momentum={self.momentum} and {plan.optimizer}, which has a momentum of its own, "
            f"moves the center too far in a run of {rounds:.3g} windows per worker. momentum=0 holds, and so do "
            f"{enough} windows or more."
        ]

    def begin(self, me: Replica) -> None:
        if me.anchor is me.center:  # it begins from the center as it is: at first, and after a refusal
            me.slots["pulled"] = me.center

    def commit(self, me: Replica) -> Vector:
        update, proxy = me.movement(), me.slots["proxy"]
        proxy.mul_(self.momentum).add_(update)
        energy = self.kappa * proxy.abs() - (me.center - me.slots["pulled"]).abs()
        me.slots["pulled"] = me.center
        return (energy / (update.abs() + self.epsilon)).clamp(0, self.clip) * update

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        for commit in commits:
            center.add(commit.value)
        return center.value

    def adopt(self, me: Replica, reply: Reply) -> None:
        if me.sent is not None:
            me.local = me.anchor = me.center + me.sent
