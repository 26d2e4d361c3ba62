"""Scale the weights of rows once, so that their mean over the training rows is 1."""

from __future__ import annotations

from typing import TypeVar

from paragrad.data.source import Arrays, Source, Weighted
from paragrad.errors import UsageError

S = TypeVar("S", bound=Source | None)


def factor(mean: float, notes: list[str]) -> float:
    """Return the factor that scales weights to a mean of 1, so that the learning rate keeps its meaning."""
    if not mean:
        raise UsageError("The weight of every row to train on is 0: give some rows another weight.")
    if abs(mean - 1) > 1e-6:
        notes.append(f"Weights are divided by {mean:.6g}, so that the mean of their absolute values is 1.")
    return 1 / mean


def times(source: S, scale: float) -> S | Arrays:
    """Return the rows with their weights multiplied, if they have any."""
    if not (isinstance(source, Arrays) and isinstance(source.tree, Weighted)):
        return source
    return Arrays(Weighted(source.tree.rows, source.tree.weight * scale))
