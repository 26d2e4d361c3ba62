"""ADAG: AGN that also shrinks each element of a commit by how far the center has moved there meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paragrad.core.replica import Replica
from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Reply, Vector

TINY = 1e-30
"""Stands for a learning rate of 0 (a warm-up's first step), whose movement is 0 as well: 0/0 must not come of it."""


@dataclass(frozen=True)
class ADAG(Scheme):
    """c <- c + d / λ' · 1 / (1 + (c - a)² / γ), element by element, a what the window began from;  the worker takes c.

    Hermans, *On Scalable Deep Learning and Parallelizing Gradient Descent* (2017), chapter 4: staleness is a distance,
    not a count. ``form``: "eta" has γ = η, "gamma" a free γ, "invariant" ((c - a) / η)², the only one that does not
    change with the learning rate (the thesis cancels an η too many). Where the center has not moved it is AGN.
    *Name trap*: the class ``ADAG`` of Distributed Keras is AGN, and its class ``Experimental`` is this.

    Choose it with many workers where AGN is unstable early on.
    Not where the center moves far within a window on purpose: at distance √γ an element counts half.
    """

    window: int = 15
    form: Literal["eta", "gamma", "invariant"] = "gamma"
    """What the distance is measured by."""
    gamma: float = 1e-4
    """The square of the distance at which a movement counts half; only for form "gamma"."""
    place: Literal["remembers", "sends", "pulls"] = "remembers"
    """The center remembers a, or the worker sends it along, or it pulls c once more and shrinks d itself."""

    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in ("eta", "gamma", "invariant"):
            raise UsageError(f"form={self.form!r}, but the distance is measured by 'eta', 'gamma' or 'invariant'.")
        if self.place not in ("remembers", "sends", "pulls"):
            raise UsageError(f"place={self.place!r}, but a place is 'remembers', 'sends' or 'pulls'.")
        if not self.gamma > 0:
            raise UsageError(f"gamma={self.gamma}, but a squared distance is divided by it: take gamma > 0, such as 1e-4.")

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
        """What is left of a movement over which the center moved by ``distance``."""
        if self.form != "gamma" and not lr >= 0:
            raise UsageError(f"ADAG(form={self.form!r}) measures by the optimiser's rate, which is {lr}. Take form='gamma'.")
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
        me.local = me.anchor = me.center + me.sent  # as printed it would begin again from before its own commit
        return None
