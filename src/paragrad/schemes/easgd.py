"""EASGD: synchronous elastic averaging; all workers and the center attract each other at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from paragrad.core.replica import Replica
from paragrad.errors import UsageError
from paragrad.schemes.scheme import Synchronous
from paragrad.types import CenterView, Commit, Reply, SchemePlan, Vector

Form: TypeAlias = Literal["sum", "mean"]
Ends: TypeAlias = Literal["window", "thesis", "relative"]
Starts: TypeAlias = Literal["center", "own"]


@dataclass(frozen=True)
class EASGD(Synchronous):
    """eᵢ = α (wᵢ - c);  c <- c + Σ eᵢ;  wᵢ <- wᵢ - eᵢ, all from the same c.

    Zhang, Choromanska, LeCun, *Deep learning with Elastic Averaging SGD* (NIPS 2015), with α = β / n. An exchange multiplies
    the distance between c and the mean of the workers by 1 - α (n + 1), so that it is stable for α (n + 1) < 2. With
    ``form="mean"`` (c <- c + mean eᵢ, as in Distributed Keras) the factor is 1 - 2α for every n. One worker is AEASGD(alpha=α).

    Choose it if workers are equally fast, should explore, and communicate rarely.
    Not if one worker is slow: all wait for it. Take AEASGD.
    """

    window: int = 10
    beta: float = 0.9
    """n α: share of its distance from the mean of the workers that the center moves."""
    alpha: float | None = None
    """Share of the distance that a worker moves at an exchange; by default beta / n."""
    form: Form = "sum"
    """The center takes the sum of the forces, or their mean (it then moves by α of the distance)."""
    ends: Ends = "window"
    """End of a window: after all its steps, or early if the elastic force exceeds the step. "thesis" (Hermans 2017) ends it if
    ‖ηg‖ - ‖α(w - c)‖ < η, which is at every step once ‖g‖ < 1; "relative" ends it if ‖ηg‖ < ‖α(w - c)‖."""
    starts: Starts = "center"
    """Workers start from the center, or each from its own random point."""

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
            value, choices = getattr(self, name), get_args(known)
            if value not in choices:
                raise UsageError(f"{name}={value!r}, but it must be one of {', '.join(map(repr, choices))}.")

    @property
    def early(self) -> Literal["step"] | None:
        return None if self.ends == "window" else "step"

    def strength(self, workers: int) -> float:
        """Return α."""
        return self.beta / workers if self.alpha is None else self.alpha

    def go_on(self, me: Replica) -> bool:
        spring = self.strength(me.workers) * float(torch.linalg.vector_norm(me.local - me.center))
        return me.moved - spring >= (me.lr if self.ends == "thesis" else 0.0)

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
            "and is known to diverge: at every exchange the center oscillates at least as far. "
            f"Take alpha below {2 / pulls:.3f} (beta below {2 * workers / pulls:.3f})."
        ]
