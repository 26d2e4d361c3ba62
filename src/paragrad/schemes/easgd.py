"""EASGD: synchronous elastic averaging; all workers pull at the center at once, and it at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from paragrad.core.replica import Replica
from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Reply, SchemePlan, Vector

Form: TypeAlias = Literal["sum", "mean"]
Ends: TypeAlias = Literal["window", "thesis", "relative"]
Starts: TypeAlias = Literal["center", "own"]


@dataclass(frozen=True)
class EASGD(Scheme):
    """eᵢ = α (wᵢ - c);  c <- c + Σ eᵢ;  wᵢ <- wᵢ - eᵢ, all from the same c.

    Zhang, Choromanska, LeCun, *Deep learning with Elastic Averaging SGD* (NIPS 2015), with α = β / n. The
    distance of the workers' mean from c shrinks by 1 - α (n + 1), so that it holds while α (n + 1) < 2; with
    ``form="mean"`` (c <- c + mean eᵢ, Distributed Keras) by 1 - 2α, for every n. One worker is AEASGD(alpha=α).

    Choose it when workers are equally fast, should explore, and talk rarely.
    Not when one worker is slow: all wait for it. Take AEASGD.
    """

    window: int = 10
    beta: float = 0.9
    """n α: the share of its distance from the workers' mean that the center moves."""
    alpha: float | None = None
    """Share of the distance that a worker gives up at an exchange; by default beta / n."""
    form: Form = "sum"
    """Whether the center takes the sum of the forces, or their mean (it then moves by α of the distance)."""
    ends: Ends = "window"
    """Where local work only stretches the spring a window may end early. By "thesis" (Hermans 2017) when
    ‖ηg‖ - ‖α(w - c)‖ < η, and so at every step once ‖g‖ < 1; by "relative" when ‖ηg‖ < ‖α(w - c)‖."""
    starts: Starts = "center"
    """Whether workers begin from the center, or each from a random point of its own."""

    elementwise = True
    carries = True
    adopts_from = ("local", "sent")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta <= 0:
            raise UsageError(f"beta={self.beta}, but the center moves towards its workers only for beta > 0.")
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise UsageError(f"alpha={self.alpha}, but the elastic force is stable only for 0 < alpha <= 1.")
        for name, known in (("form", Form), ("ends", Ends), ("starts", Starts)):
            if getattr(self, name) not in get_args(known):
                raise UsageError(f"{name}={getattr(self, name)!r}, but it is one of {', '.join(map(repr, get_args(known)))}.")
        if self.bound is not None:
            raise UsageError("EASGD is synchronous: a bound on staleness has no meaning, leave it out.")

    @property
    def early(self) -> Literal["step"] | None:
        return None if self.ends == "window" else "step"

    def strength(self, workers: int) -> float:
        """α."""
        return self.beta / workers if self.alpha is None else self.alpha

    def go_on(self, me: Replica) -> bool:
        spring = self.strength(me.workers) * float(torch.linalg.vector_norm(me.local - me.center))
        return me.moved - spring >= (me.lr if self.ends == "thesis" else 0.0)

    def quorum(self, workers: int) -> int:
        return workers

    def commit(self, me: Replica) -> Vector:
        return self.strength(me.workers) * (me.local - me.center)

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        for commit in commits:
            center.add(commit.value, 1.0 if self.form == "sum" else 1.0 / len(commits))
        return center.value

    def adopt(self, me: Replica, reply: Reply) -> None:
        assert me.sent is not None
        me.local -= me.sent
        me.anchor = me.center = reply.value

    def warnings(self, plan: SchemePlan) -> list[str]:
        workers = plan.workers
        alpha, pulls = self.strength(workers), workers + 1 if self.form == "sum" else 2
        if alpha * pulls < 2:
            return []
        product = "alpha * (workers + 1)" if self.form == "sum" else "alpha * 2"
        return [
            f"EASGD(form={self.form!r}) with alpha={alpha:.4g} and {workers} workers has {product} = {alpha * pulls:.2f} >= 2 "
            "and is known to diverge: the center swings as far out at every exchange, or further. "
            f"alpha below {2 / pulls:.3f} (beta below {2 * workers / pulls:.3f}) holds."
        ]
