"""Model outputs as probabilities or numbers, and their metrics, gathered batch by batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional as F

from paragrad.errors import unknown
from paragrad.evaluation import metrics
from paragrad.evaluation.card import Head

Array: TypeAlias = np.ndarray[Any, Any]
BY_CLASS = ("softmax", "log_softmax", "scores", "probabilities")
"""Heads with one output per class."""
SIGNAL = ("signal", "sig", "s", "yes", "true")
"""Names of a class that count as the signal."""


def scores_of(output: torch.Tensor, head: Head, axis: int) -> Array:
    """Return probabilities, or numbers as they are; ``axis`` is the axis of the classes."""
    if head == "softmax":
        output = output.softmax(axis)
    elif head == "log_softmax":
        output = output.exp()
    elif head == "sigmoid":
        output = output.sigmoid()
    if head not in BY_CLASS and output.ndim == 2 and output.shape[1] == 1:
        output = output[:, 0]
    return np.asarray(as_numpy(output))


def _logarithms(output: torch.Tensor, head: Head, axis: int) -> torch.Tensor:
    """Return a score per class in the last dimension: the logarithm of its probability if there are probabilities."""
    if head in BY_CLASS:
        output = output.movedim(axis, -1)
        if head == "probabilities":
            return output.clamp(torch.finfo(output.dtype).tiny, 1.0).log()
        return F.log_softmax(output, -1) if head == "softmax" else output
    if head == "sigmoid":
        return torch.stack([F.logsigmoid(-output), F.logsigmoid(output)], -1)
    output = output.clamp(torch.finfo(output.dtype).tiny, 1.0)
    return torch.stack([torch.log1p(-output).clamp(min=-100.0), output.log()], -1)


def as_numpy(value: Any) -> Any:
    """Convert a tensor to an array; return anything else as it is."""
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def signal_of(classes: Sequence[str] | None) -> int:
    """Return the index of the signal among two classes: the one with such a name, or else the second."""
    names = [name.lower() for name in classes or ()]
    return 0 if len(names) == 2 and names[0] in SIGNAL and names[1] not in SIGNAL else 1


def positive_of(name: str, classes: Sequence[str]) -> int:
    """Return the number of a class by its name."""
    if name not in classes:
        raise unknown("class", name, classes)
    return list(classes).index(name)


class Gathered:
    """Metrics that fit the outputs, gathered batch by batch; F1 is that of the ``positive`` class."""

    def __init__(
        self,
        head: Head,
        axis: int,
        output: torch.Tensor,
        target: torch.Tensor,
        classes: Sequence[str] | None = None,
        positive: str | None = None,
    ) -> None:
        self._head = head
        self._axis = axis
        self._soft = head in BY_CLASS and target.is_floating_point() and target.ndim == output.ndim
        self._each: list[Any] = []
        if head == "numbers":
            self._each = [metrics.Numbers()]
        elif head not in ("value", "raw"):
            yes = head in ("sigmoid", "probability")
            count = 2 if yes else output.shape[axis]
            names = tuple(classes) if classes else tuple(str(number) for number in range(count))
            signal = signal_of(classes) if positive is None else positive_of(positive, names)
            chosen = signal if count == 2 or positive is not None else None
            self._positive = None if chosen is None else names[chosen]
            self._each = [metrics.Classes(count, chosen) for _ in range(math.prod(output.shape[1:]) if yes else 1)]

    def add(self, output: Any, target: Any, weight: Array | None) -> None:
        """Add the next rows."""
        if self._head in ("numbers", "value", "raw"):
            for numbers in self._each:
                numbers.add(as_numpy(output), as_numpy(target), weight)
            return
        scores = _logarithms(output, self._head, self._axis)
        if self._head in ("sigmoid", "probability"):
            flat, wanted = scores.reshape(len(scores), -1, 2), (target > 0.5).reshape(len(target), -1)
            for place, one in enumerate(self._each):
                one.add(as_numpy(flat[:, place]), as_numpy(wanted[:, place]).astype(np.int64), weight)
            return
        wanted = target.argmax(self._axis) if self._soft else target.long()
        within = math.prod(wanted.shape[1:])
        weight = weight if weight is None or within == 1 else np.repeat(weight, within)
        flat = scores.reshape(-1, scores.shape[-1])
        self._each[0].add(as_numpy(flat), as_numpy(wanted).reshape(-1), weight, logarithms=self._head != "scores")

    def result(self) -> dict[str, Any]:
        """Return the metrics by name; for several labels, their means."""
        found = [one.result() for one in self._each]
        if len(found) < 2:
            return {**dict(*found), **({"positive": self._positive} if any("f1" in one for one in found) else {})}
        return {name: float(np.mean([one[name] for one in found])) for name in ("accuracy", "log_loss", "auc", "f1")}
