"""StalenessAware: one step per asynchronous gradient, with the learning rate divided by its staleness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Vector


@dataclass(frozen=True)
class StalenessAware(Scheme):
    """c <- one step of the optimiser on g with learning rate η / max(1, τ), τ the staleness of g;  the worker takes c.

    Zhang, Gupta, Lian, Liu, *Staleness-aware Async-SGD for Distributed Deep Learning* (IJCAI 2016), arXiv:1511.05950.
    The step is scaled, not g, so that it works for Adam too (which ignores the scale of g). A window of λ steps is the mean
    gradient of λ mini-batches.

    Choose it if one optimiser should see all gradients, and workers differ in speed.
    Not with a slow network: it exchanges a gradient per window, and longer windows are only larger batches.
    """

    ships = "gradient"
    elementwise = True

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        for commit in commits:
            center.step(commit.value, 1.0 / max(1, commit.staleness))
        return center.value
