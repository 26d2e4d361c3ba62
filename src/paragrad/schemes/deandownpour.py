"""DeanDownpour: Downpour as published, with Adagrad at the center, separate pulls, and a warm start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.core.replica import Replica
from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Reply, Vector


@dataclass(frozen=True)
class DeanDownpour(Scheme):
    """G = -d / η;  s <- s + G²;  c <- c - γ G / (√s + ε);  the worker takes c every ``fetch`` steps.

    Dean et al., *Large Scale Distributed Deep Networks* (NIPS 2012), section 4.1 and algorithm 7.1: G is the sum of the
    gradients of ``window`` steps (n_push in the paper), and ``fetch`` is n_fetch. Each element has its own learning rate, and a
    single worker makes the first ``warm`` updates. The local optimiser must be plain SGD (``sgd:lr=...``), because G is its
    movement divided by its learning rate.

    Choose it for Downpour with many workers: the falling learning rates of Adagrad keep it stable.
    Not for long runs that need large steps late: s only grows.
    """

    rate: float = 0.01
    """γ: learning rate of Adagrad at the center."""
    fetch: int | None = None
    """Steps between pulls; None: the answer to each commit contains the center."""
    warm: int = 0
    """Updates that one worker makes alone before the others start."""
    epsilon: float = 1e-10
    """Avoids a division by 0 for elements without gradient."""

    center_slots = ("squares",)
    worker_slots = ("accrued",)
    elementwise = True
    plain_sgd = True
    carries = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate <= 0 or self.epsilon <= 0:
            raise UsageError(f"rate={self.rate}, epsilon={self.epsilon}, but DeanDownpour needs both above 0.")
        if self.fetch is not None and self.fetch < 1:
            raise UsageError(
                f"fetch={self.fetch}, but a worker makes at least 1 step between pulls; None: the answers contain the center."
            )
        if self.warm < 0:
            raise UsageError(f"warm={self.warm}, but it must be a number of updates; with 0 all workers start together.")

    @property
    def pulls(self) -> int | None:
        return self.fetch

    @property
    def adopts_from(self) -> tuple[str, ...]:
        return () if self.fetch is None and not self.overlap else ("local",)

    def steps(self, center: CenterView, worker: int) -> int:
        alone = center.clock < self.warm
        return 0 if alone and worker != min(center.working, default=worker) else self.window

    def begin(self, me: Replica) -> None:
        me.slots["accrued"].zero_()

    def pulled(self, me: Replica) -> None:
        me.slots["accrued"] += me.local - me.anchor
        me.local = me.center
        me.anchor = me.local.clone()

    def commit(self, me: Replica) -> Vector:
        movement = me.local - me.anchor if self.fetch is None else me.slots["accrued"] + me.local - me.anchor
        if me.lr <= 0:
            raise UsageError(f"The local learning rate is {me.lr}, but DeanDownpour divides by it: use sgd with lr above 0.")
        return movement / -me.lr

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        squares = center.slots["squares"]
        for commit in commits:
            squares.addcmul_(commit.value, commit.value)
            center.add(commit.value / (squares.sqrt() + self.epsilon), -self.rate)
        return center.value

    def adopt(self, me: Replica, reply: Reply) -> bool | None:
        if self.fetch is not None and me.total % self.fetch:
            me.anchor = me.local.clone()
            return False
        return super().adopt(me, reply)
