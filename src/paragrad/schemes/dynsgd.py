"""DynSGD: like Downpour, but each movement is divided by its staleness."""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.schemes.scheme import Scheme
from paragrad.types import Commit


@dataclass(frozen=True)
class DynSGD(Scheme):
    """c <- c + d / (τ + 1), with τ the updates of the center since the window began;  the worker takes c.

    Jiang, Cui, Zhang, Yu, *Heterogeneity-aware Distributed Parameter Servers* (SIGMOD 2017). Equal workers have τ = n - 1, so
    that n windows together count as their mean. At window 1 and curvature h it is stable for ηh < 2n sin(π / (4n - 2)), which
    is never below π/2; Downpour allows one n-th of that.

    Choose it with workers of different speeds, or with too many workers for Downpour.
    Not for speed with many equal workers: together they move the center no faster than one.
    """

    window: int = 5

    elementwise = True

    def scale(self, commit: Commit) -> float:
        return 1.0 / (commit.staleness + 1)
