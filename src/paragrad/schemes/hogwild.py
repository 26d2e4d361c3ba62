"""Hogwild: workers write their steps directly into the shared weights, without a lock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.core.replica import Replica
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Reply, Vector


@dataclass(frozen=True)
class Hogwild(Scheme):
    """c <- c - η g(c), by all workers at the same time, element by element;  the worker's weights are c.

    Recht, Ré, Wright, Niu, *Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent* (NIPS 2011). A worker
    reads while others write, and a step may be lost if two workers write to the same element. A worker reports its progress
    after each window. The center cannot reject a step: NaN stays, and so do the steps of a lost worker, whose rows are trained
    again.

    Choose it on one machine with sparse gradients, so that workers rarely write to the same elements.
    Not for dense models with many workers, nor if a run must be reproducible to the bit.
    """

    starts = "shared"

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        return center.value

    def adopt(self, me: Replica, reply: Reply) -> None:
        """Do nothing: the weights are the center, and a copy would overwrite what other workers write meanwhile."""
