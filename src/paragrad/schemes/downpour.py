"""Downpour: workers add their movement to the center whenever they are ready; nobody waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paragrad.core.replica import Replica
from paragrad.schemes.scheme import Scheme
from paragrad.types import Commit, SchemePlan


@dataclass(frozen=True)
class Downpour(Scheme):
    """c <- c + d, with d = w - a the movement of a window;  the worker takes c.

    Dean et al., *Large Scale Distributed Deep Networks* (NIPS 2012). Asynchrony acts as momentum of
    1 - 1/n (Mitliagkas et al. 2016), so that many workers, or long windows, overshoot.

    Choose it with window 1, few workers and plain SGD at a modest rate.
    Not with longer windows or many workers: nothing normalises what they add. Take AGN.
    """

    zealous: bool = False
    """Commit as soon as the center has nothing to do, at the latest after the window (Hermans 2017)."""

    elementwise = True

    @property
    def early(self) -> Literal["queue"] | None:
        return "queue" if self.zealous else None

    def go_on(self, me: Replica) -> bool:
        return me.busy

    def scale(self, commit: Commit) -> float:
        return 1.0

    def warnings(self, plan: SchemePlan) -> list[str]:
        workers = plan.workers
        if workers > 1 and (self.window > 1 or workers >= 20):
            return [
                f"Downpour adds {workers} workers' windows of {self.window} steps at full length and is known to diverge "
                f"from there on (Hermans: 10 workers with windows of 5 or more, 20 workers with 1). "
                f"AGN(window={max(self.window, 5)}) divides each window by its steps and holds."
            ]
        return []
