"""EAMSGD: asynchronous elastic averaging with Nesterov momentum in the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.core.replica import Replica
from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Reply, Vector


@dataclass(frozen=True)
class EAMSGD(Scheme):
    """v <- δ v - η g(w + δ v);  w <- w + v;  after a window e = α (w - c);  c <- c + e;  w <- w - e.

    Zhang, Choromanska, LeCun, *Deep learning with Elastic Averaging SGD* (NIPS 2015). The center computes the force and applies
    it at once; the next gradient is taken after it (in the paper: at the w before). The local optimiser must be plain SGD
    ("sgd:lr=..."): v is computed from its movement, and the momentum of another optimiser would be added to it.
    EAMSGD(momentum=0) is AEASGD.

    Choose it over AEASGD if momentum also helps a single process.
    Not with an optimiser other than plain SGD: take AEASGD, which works with any.
    """

    window: int = 10
    alpha: float = 0.1
    """Share of the distance that worker and center each move at an exchange."""
    momentum: float = 0.9
    """δ, the Nesterov momentum of the workers."""

    # Between steps the model is at the look-ahead point w + δ v, where the next gradient is taken.
    worker_slots = ("weights", "velocity")
    adopts_from = ()
    early = "step"
    ships = "weights"
    answers = "own"
    elementwise = True
    plain_sgd = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha <= 1:
            raise UsageError(f"alpha={self.alpha}, but the elastic force is stable only for 0 < alpha <= 1.")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum={self.momentum}, but EAMSGD needs 0 <= momentum < 1.")

    def begin(self, me: Replica) -> None:
        if me.anchor is not me.slots["weights"]:
            # The worker starts at the center: at the beginning, or after a rejected commit.
            me.slots["weights"] = me.local
            me.slots["velocity"].zero_()

    def go_on(self, me: Replica) -> bool:
        weights, velocity = me.slots["weights"], me.slots["velocity"]
        velocity.copy_(me.local).sub_(weights)
        weights.copy_(me.local)
        me.local.add_(velocity, alpha=self.momentum)
        return True

    def commit(self, me: Replica) -> Vector:
        return me.slots["weights"]

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> list[Vector]:
        return [center.approach(commit.value, self.alpha) for commit in commits]

    def adopt(self, me: Replica, reply: Reply) -> None:
        weights = me.slots["weights"]
        weights -= reply.value
        me.local = weights + self.momentum * me.slots["velocity"]
        me.anchor = weights
