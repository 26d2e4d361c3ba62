"""Hogwild: workers write their steps straight into the shared weights, without a lock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.core.replica import Replica
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Reply, Vector


@dataclass(frozen=True)
class Hogwild(Scheme):
    """c <- c - η g(c), by every worker at once and element by element as it comes;  the worker's weights are c.

    Recht, Ré, Wright, Niu, *Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent* (NIPS
    2011). A worker reads while others write, and a step may be lost where two write to one element. A window is
    how often a worker reports what it has done. What is written cannot be refused: NaN stays, and so do the steps of
    a lost worker, whose rows are done again.

    Choose it on one machine where gradients are sparse, so that workers seldom meet.
    Not for dense models with many workers, nor where a run must repeat to the bit.
    """

    starts = "shared"

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        return center.value

    def adopt(self, me: Replica, reply: Reply) -> None:
        """Nothing: the weights are the center, and copying them onto themselves would undo what others write meanwhile."""
