"""Quality of predictions: accuracy, log loss, ROC AUC, F1 and significance, or errors of numbers. Rows come in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from paragrad.errors import UsageError

Array: TypeAlias = np.ndarray[Any, Any]
REGULARISATION = 10.0
"""Constant that the Higgs challenge adds to the background, so that a cut with almost no background does not win."""
IGNORED = -100
"""torch's default for targets to ignore."""


# -- of all rows at once --------------------------------------------------------------------------------------------


def accuracy(predicted: Array, target: Array, weight: Array | None = None) -> float:
    """Return the share of right answers."""
    return float(np.average(np.asarray(predicted) == np.asarray(target), weights=weight))


def log_loss(probabilities: Array, target: Array, weight: Array | None = None) -> float:
    """Return the mean of -log(probability of the true class), from one column per class or the column of class 1."""
    p = np.asarray(probabilities, dtype=np.float64)
    p = np.stack([1 - p, p], axis=1) if p.ndim == 1 else p
    true = np.clip(p[np.arange(len(p)), target], np.finfo(np.float64).tiny, 1.0)
    return float(np.average(-np.log(true), weights=weight))


def roc_auc(score: Array, positive: Array, weight: Array | None = None) -> float:
    """Return the weighted share of pairs (positive row, other row) in which the positive row has the higher score.

    Equal scores count half. Weights may be negative. The result is NaN if the weights of either kind sum to 0.
    """
    _, mine, others = _by_score(score, positive, weight, descending=False)
    pairs = float(mine.sum() * others.sum())
    if not pairs:
        return float("nan")
    below = np.cumsum(others) - others
    return float((mine * (below + others / 2)).sum() / pairs)


def confusion(predicted: Array, target: Array, classes: int, weight: Array | None = None) -> Array:
    """Return the number (or weight) of rows by true class (matrix rows) and predicted class (matrix columns)."""
    place = np.asarray(target, dtype=np.int64) * classes + np.asarray(predicted, dtype=np.int64)
    counts = np.bincount(place, weights=weight, minlength=classes**2)
    return counts.reshape(classes, classes)


def f1(matrix: Array) -> Array:
    """Return the F1 score of each class from the confusion matrix: 2 right / (true + predicted), or 0 for 0 / 0."""
    right, total = np.diag(matrix).astype(np.float64), matrix.sum(0) + matrix.sum(1)
    found: Array = np.divide(2 * right, total, out=np.zeros(len(right)), where=total != 0)
    return found


def ams(s: Array | float, b: Array | float, regularisation: float = REGULARISATION) -> Array:
    """Return the approximate median significance of the Higgs challenge: sqrt(2 ((s + b + r) ln(1 + s / (b + r)) - s)).

    It is 0 if there is no signal, or if negative weights leave no background.
    """
    s, b = np.broadcast_arrays(np.asarray(s, dtype=np.float64), np.asarray(b, dtype=np.float64) + regularisation)
    fine = (s > 0) & (b > 0)
    s, b = np.where(fine, s, 0.0), np.where(fine, b, 1.0)
    return np.where(fine, np.sqrt(np.maximum(2 * ((s + b) * np.log1p(s / b) - s), 0.0)), 0.0)


def s_over_root_b(s: Array | float, b: Array | float) -> Array:
    """Return s / sqrt(b); 0 if there is no signal or no background."""
    s, b = np.broadcast_arrays(np.asarray(s, dtype=np.float64), np.asarray(b, dtype=np.float64))
    fine = (s > 0) & (b > 0)
    return np.where(fine, s, 0.0) / np.sqrt(np.where(fine, b, 1.0))


@dataclass(frozen=True)
class Cut:
    """Rows with a score of at least ``threshold``, and their figure of merit."""

    threshold: float
    s: float
    """Weight of the signal above the cut."""
    b: float
    """Weight of the background above the cut."""
    value: float
    """Figure of merit."""


def best_cut(score: Array, signal: Array, weight: Array | None = None, figure: Callable[[Array, Array], Array] = ams) -> Cut:
    """Return the cut on the score with the best figure of merit."""
    thresholds, signals, backgrounds = _by_score(score, signal, weight, descending=True)
    s, b = np.cumsum(signals), np.cumsum(backgrounds)
    values = figure(s, b)
    best = int(np.argmax(values))
    return Cut(float(thresholds[best]), float(s[best]), float(b[best]), float(values[best]))


def _by_score(score: Array, positive: Array, weight: Array | None, *, descending: bool) -> tuple[Array, Array, Array]:
    """Return the distinct scores in order, and for each the total weight of positive and of other rows."""
    score, positive = np.asarray(score), np.asarray(positive, dtype=bool)
    weight = np.ones(len(score)) if weight is None else np.asarray(weight, dtype=np.float64)
    if not len(score):
        raise UsageError("There are no rows to evaluate.")
    if not np.isfinite(weight).all():
        raise UsageError("A weight is NaN or infinite.")
    if np.isnan(score).any():
        raise UsageError("A score is NaN: the model has diverged or does not fit these rows.")
    order = np.argsort(-score if descending else score, kind="stable")
    ordered = score[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    mine, others = (
        np.add.reduceat(weights[order], starts)
        for weights in (np.where(positive, weight, 0.0), np.where(positive, 0.0, weight))
    )
    return ordered[starts], mine, others


# -- piece by piece -------------------------------------------------------------------------------------------------


class Classes:
    """Metrics of a choice among classes, gathered piece by piece.

    It keeps a confusion matrix and the weights. The ROC AUC needs all scores: 5 bytes per row for two classes; for more
    classes 4 per class, and 1 to 4 for the label.
    """

    def __init__(self, classes: int, signal: int | None = None) -> None:
        self.count = classes
        self._signal = 1 if signal is None and classes == 2 else signal
        """Class for F1 and the significance; None: no class is special."""
        self.matrix = np.zeros((classes, classes))
        self.rows = 0
        self._small = np.uint8 if classes <= 256 else np.int32
        self._scores: list[Array] = []
        self._targets: list[Array] = []
        self._weights: list[Array] = []
        self._log_loss = 0.0
        self._logarithms = True

    def add(self, scores: Array, target: Array, weight: Array | None = None, *, logarithms: bool = True) -> None:
        """Add the next rows: a score per class, either ``logarithms`` of probabilities or anything that grows with them."""
        counts = target != IGNORED
        if not counts.all():
            scores, target = scores[counts], target[counts]
            weight = None if weight is None else weight[counts]
        wrong = (target < 0) | (target >= self.count)
        if wrong.any():
            raise UsageError(f"A label is {target[wrong.argmax()]}, but the model has {self.count} classes, numbered from 0.")
        self.rows += len(target)
        self.matrix += confusion(scores.argmax(1), target, self.count, weight)
        self._logarithms &= logarithms
        each = np.ones(len(target)) if weight is None else weight
        self._log_loss -= float((scores[np.arange(len(target)), target].astype(np.float64) * each).sum())
        kept = scores[:, 1] - scores[:, 0] if self.count == 2 else scores
        self._scores.append(kept.astype(np.float32))
        self._targets.append(target.astype(self._small))
        if weight is not None:
            self._weights.append(np.asarray(weight))

    def result(self) -> dict[str, Any]:
        """Return accuracy, log_loss, auc, f1 and confusion; with weights and two classes also the most significant cut."""
        if not self.rows:
            raise UsageError("There are no rows to evaluate.")
        total = self.matrix.sum()
        scores, target = np.concatenate(self._scores), np.concatenate(self._targets)
        weight = np.concatenate(self._weights) if self._weights else None
        found: dict[str, Any] = {"accuracy": float(np.trace(self.matrix) / total) if total else float("nan")}
        if self._logarithms:
            found["log_loss"] = self._log_loss / float(total) if total else float("nan")
        if self.count == 2:
            scores = scores if self._signal else -scores
            found["auc"] = roc_auc(scores, target == self._signal, weight)
        else:
            each = [roc_auc(scores[:, kind], target == kind, weight) for kind in range(self.count)]
            defined = [value for value in each if not np.isnan(value)]
            found["auc"] = float(np.mean(defined)) if defined else float("nan")
        if self._signal is not None:
            found["f1"] = float(f1(self.matrix)[self._signal])
        found["f1_macro"] = float(f1(self.matrix).mean())
        found["confusion"] = self.matrix.tolist() if weight is not None else self.matrix.astype(np.int64).tolist()
        if self.count == 2 and weight is not None:
            found["significance"] = self._significance(scores, target == self._signal, weight)
        return found

    def _significance(self, scores: Array, signal: Array, weight: Array) -> dict[str, float]:
        cut = best_cut(scores, signal, weight)
        share = float(1 / (1 + np.exp(-np.float64(np.clip(cut.threshold, -700, 700))))) if self._logarithms else cut.threshold
        return {"ams": cut.value, "s_over_root_b": float(s_over_root_b(cut.s, cut.b)), "cut": share, "s": cut.s, "b": cut.b}


class Numbers:
    """Errors of predicted numbers, gathered piece by piece in constant memory."""

    def __init__(self) -> None:
        self.rows = 0
        self._weight = 0.0
        self._squared: Any = 0.0
        self._absolute: Any = 0.0
        self._mean: Any = 0.0
        self._spread: Any = 0.0

    def add(self, predicted: Array, target: Array, weight: Array | None = None) -> None:
        """Add the next rows; the errors of several numbers per row are averaged."""
        if not len(target):
            return
        found = np.asarray(predicted, dtype=np.float64).reshape(len(predicted), -1)
        true = np.asarray(target, dtype=np.float64).reshape(len(target), -1)
        if found.shape != true.shape:
            raise UsageError(f"The model returns {found.shape[1]} numbers for a row, but its target has {true.shape[1]}.")
        each = (np.ones(len(true)) if weight is None else np.asarray(weight, dtype=np.float64))[:, None]
        here = float(each.sum())
        mean = (each * true).sum(0) / here if here else np.zeros(true.shape[1])
        error, step, total = found - true, mean - self._mean, self._weight + here
        self._squared = self._squared + (each * error**2).sum(0)
        self._absolute = self._absolute + (each * np.abs(error)).sum(0)
        if total:
            self._spread = self._spread + (each * (true - mean) ** 2).sum(0) + step**2 * self._weight * here / total
            self._mean = self._mean + step * here / total
        self.rows += len(true)
        self._weight = total

    def result(self) -> dict[str, float]:
        """Return mse, mae and r2."""
        if not self.rows:
            raise UsageError("There are no rows to evaluate.")
        if not self._weight:
            return dict.fromkeys(("mse", "mae", "r2"), float("nan"))
        unexplained = np.divide(
            self._squared, self._spread, out=np.full(np.shape(self._squared), np.nan), where=self._spread != 0
        )
        return {
            "mse": float(np.mean(self._squared / self._weight)),
            "mae": float(np.mean(self._absolute / self._weight)),
            "r2": float(np.mean(1 - unexplained)),
        }
