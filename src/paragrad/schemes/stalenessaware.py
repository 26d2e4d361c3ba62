"""StalenessAware: asynchronous gradients, each stepped with the learning rate divided by its staleness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Vector


@dataclass(frozen=True)
class StalenessAware(Scheme):
    """c <- one step of the optimiser on g with rate η / max(1, τ), τ the staleness of g;  the worker takes c.

    Zhang, Gupta, Lian, Liu, *Staleness-aware Async-SGD for Distributed Deep Learning* (IJCAI 2016), arXiv:1511.05950.
    It is the step that is scaled, not g, so that it holds for Adam too (to which a scaled g is the same g). A window
    of λ is the mean gradient of λ mini-batches.

    Choose it where one optimiser should see all gradients, and workers differ in speed.
    Not where the link is slow: it exchanges a gradient for every window, and one worker's windows are larger batches.
    """

    ships = "gradient"
    elementwise = True

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        for commit in commits:
            center.step(commit.value, 1.0 / max(1, commit.staleness))
        return center.value
