"""DCASGD: asynchronous gradients, corrected to first order for the movement of the center since they were taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Vector

EPSILON = 1e-7
"""Added under the root of the adaptive form."""


@dataclass(frozen=True)
class DCASGD(Scheme):
    """c <- one step of the optimiser on g + λ g² (c - a), a the center at which g was taken;  the worker takes c.

    Zheng et al., *Asynchronous Stochastic Gradient Descent with Delay Compensation* (ICML 2017), arXiv:1609.08326:
    g² approximates the curvature. Adaptive: λ / √(m + 1e-7) instead of λ, with m <- 0.95 m + 0.05 g². The center keeps a copy
    of a for every worker. A single worker has c = a, which is plain training.

    Choose it for asynchronous SGD with a few workers, if gradients are small and λ can be tuned.
    Not with large gradients: the correction grows with g², and the constant form then overshoots. Take adaptive.
    """

    strength: float | None = None
    """λ; by default 0.04 as in the paper, or 2 if adaptive."""
    adaptive: bool = False
    """Divide λ by the root of a running mean of g²."""
    decay: float = 0.95
    """Decay of that mean."""

    ships = "gradient"
    answers = "remembered"
    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strength is not None and not self.strength >= 0:
            raise UsageError(f"strength={self.strength}, but it must be 0 or more; the paper takes 0.04, adaptive 2.")
        if not 0 <= self.decay < 1:
            raise UsageError(f"decay={self.decay}, but a running mean needs 0 <= decay < 1, such as 0.95.")

    @property
    def center_slots(self) -> tuple[str, ...]:
        return ("squares",) if self.adaptive else ()

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        strength = self.strength if self.strength is not None else 2.0 if self.adaptive else 0.04
        for commit in commits:
            gradient = commit.value
            bend = strength * gradient**2
            if self.adaptive:
                squares = center.slots["squares"]
                squares.mul_(self.decay).addcmul_(gradient, gradient, value=1 - self.decay)
                bend /= (squares + EPSILON).sqrt()
            center.step(gradient + bend * (center.value - center.handed[commit.worker]))
        return center.value
