"""The weights of rows, scaled once: 1 in the mean over the rows that are trained on."""

from __future__ import annotations

from typing import TypeVar

from paragrad.data.source import Arrays, Source, Weighted
from paragrad.errors import UsageError

S = TypeVar("S", bound=Source)


def factor(mean: float, notes: list[str]) -> float:
    """What weights are multiplied with, so that they are 1 in the mean: the learning rate then means what it does without."""
    if not mean:
        raise UsageError("The weight of every row to train on is 0: give some rows another.")
    if abs(mean - 1) > 1e-6:
        notes.append(f"Weights are divided by {mean:.6g}, so that the mean of their absolute values is 1.")
    return 1 / mean


def scaled(train: Source, validation: Source | None, notes: list[str]) -> tuple[Source, Source | None]:
    """Rows to train and to validate on, both scaled by the weights of those to train on; rows without weights as they are."""
    if not (isinstance(train, Arrays) and isinstance(train.tree, Weighted)):
        return train, validation
    by = factor(float(train.tree.weight.double().abs().mean()), notes)
    return times(train, by), None if validation is None else times(validation, by)


def times(source: S, by: float) -> S | Arrays:
    """The same rows with weights multiplied, if they have any."""
    if not (isinstance(source, Arrays) and isinstance(source.tree, Weighted)):
        return source
    return Arrays(Weighted(source.tree.rows, source.tree.weight * by))
