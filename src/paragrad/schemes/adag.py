"""ADAG: like AGN, but each element of a commit shrinks with the distance that the center has moved there meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paragrad.core.replica import Replica
from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Reply, Vector

TINY = 1e-30
"""Replaces a learning rate of 0 (the first step of a warm-up), because 0/0 would be NaN."""


@dataclass(frozen=True)
class ADAG(Scheme):
    """c <- c + d / λ' · 1 / (1 + (c - a)² / γ), element by element, a the start of the window;  the worker takes c.

    Hermans, *On Scalable Deep Learning and Parallelizing Gradient Descent* (2017), chapter 4: staleness is measured as a
    distance, not as a count. ``form``: "eta" has γ = η, "gamma" a free γ, "invariant" ((c - a) / η)², the only form that does
    not depend on the learning rate (the thesis cancels one η too many). If the center has not moved, ADAG is AGN. Note: in
    Distributed Keras, the class ``ADAG`` is AGN, and the class ``Experimental`` is this scheme.

    Choose it with many workers, if AGN is unstable early in training.
    Not if the center should move far within a window: at distance √γ an element counts half.
    """

    window: int = 15
    form: Literal["eta", "gamma", "invariant"] = "gamma"
    """Unit of the distance."""
    gamma: float = 1e-4
    """Square of the distance at which a movement counts half; only for form "gamma"."""
    place: Literal["remembers", "sends", "pulls"] = "remembers"
    """The center remembers a, or the worker sends it, or the worker pulls c again and shrinks d itself."""

    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in ("eta", "gamma", "invariant"):
            raise UsageError(f"form={self.form!r}, but it must be 'eta', 'gamma' or 'invariant'.")
        if self.place not in ("remembers", "sends", "pulls"):
            raise UsageError(f"place={self.place!r}, but it must be 'remembers', 'sends' or 'pulls'.")
        if not self.gamma > 0:
            raise UsageError(f"gamma={self.gamma}, but it must be above 0, such as 1e-4: it divides a squared distance.")

    @property
    def answers(self) -> Literal["center", "own", "remembered"]:
        return "remembered" if self.place == "remembers" else "center"

    @property
    def sends(self) -> tuple[str, ...]:
        return ("anchor",) if self.place == "sends" else ()

    @property
    def pulls(self) -> Literal["commit"] | None:
        return "commit" if self.place == "pulls" else None

    carries = "the distance is measured from the last answer, and a window in flight began before it"

    def shrink(self, movement: Vector, distance: Vector, lr: float) -> Vector:
        """Return a movement, shrunk by the distance that the center moved meanwhile."""
        if self.form != "gamma" and not lr >= 0:
            raise UsageError(f"ADAG(form={self.form!r}) needs the optimiser's learning rate, which is {lr}. Take form='gamma'.")
        gamma = {"eta": max(lr, TINY), "gamma": self.gamma, "invariant": 1.0}[self.form]
        if self.form == "invariant":
            distance = distance / max(lr, TINY)
        return movement / (1 + distance**2 / gamma)

    def commit(self, me: Replica) -> Vector | tuple[Vector, ...]:
        if self.place == "pulls":
            return self.shrink(me.movement(), me.center - me.anchor, me.lr) * (1.0 / me.steps)
        return (me.movement(), me.anchor) if self.place == "sends" else me.movement()

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        for commit in commits:
            if self.place == "pulls":
                center.add(commit.value)
            else:
                anchor = commit.also["anchor"] if self.place == "sends" else center.handed[commit.worker]
                center.add(self.shrink(commit.value, center.value - anchor, commit.lr), 1.0 / commit.steps)
        return center.value

    @property
    def adopts_from(self) -> tuple[str, ...]:
        return ("sent", "center") if self.place == "pulls" else ("local",) if self.overlap else ()

    def adopt(self, me: Replica, reply: Reply) -> bool | None:
        if self.place != "pulls" or me.sent is None:
            return super().adopt(me, reply)
        me.local = me.anchor = me.center + me.sent  # in the thesis as printed, the worker would restart before its own commit
        return None
