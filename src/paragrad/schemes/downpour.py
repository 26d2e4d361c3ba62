"""Downpour: each worker adds its movement to the center as soon as it is ready, without waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paragrad.core.replica import Replica
from paragrad.schemes.scheme import Scheme
from paragrad.types import Commit, SchemePlan


@dataclass(frozen=True)
class Downpour(Scheme):
    """c <- c + d, with d = w - a the movement of a window;  the worker takes c.

    Dean et al., *Large Scale Distributed Deep Networks* (NIPS 2012). Asynchrony acts like a momentum of 1 - 1/n (Mitliagkas et
    al. 2016), so that many workers, or long windows, overshoot.

    Choose it with window 1, few workers and plain SGD with a moderate learning rate.
    Not with longer windows or many workers: nothing normalises the sum of their movements. Take AGN.
    """

    zealous: bool = False
    """Commit as soon as the center is idle, at the latest after the window (Hermans 2017)."""

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
                f"Downpour with {workers} workers and windows of {self.window} steps adds all movements at full length and is "
                "known to diverge (Hermans: 10 workers with windows of 5 or more, 20 workers with 1). "
                f"AGN(window={max(self.window, 5)}) divides each window by its steps and is stable."
            ]
        return []
