"""What a model's outputs mean: probabilities or numbers, and the figures that judge them, gathered batch by batch."""

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
"""Heads with an output for each class."""


SIGNAL = ("signal", "sig", "s", "yes", "true")
"""What a class that is looked for is called."""


def scores_of(output: torch.Tensor, head: Head, axis: int) -> Array:
    """Probabilities, or the numbers as they are; classes are on this axis."""
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
    """A score for each of two or more classes, in the last dimension; logarithms of probabilities, where there are such."""
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
    """A tensor as an array; None stays None."""
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def signal_of(classes: Sequence[str] | None) -> int:
    """Which of two classes is looked for: the one that is called signal, or else the second."""
    names = [name.lower() for name in classes or ()]
    return 0 if len(names) == 2 and names[0] in SIGNAL and names[1] not in SIGNAL else 1


def positive_of(name: str, classes: Sequence[str]) -> int:
    """The number of a class by its name."""
    if name not in classes:
        raise unknown("class", name, classes)
    return list(classes).index(name)


class Gathered:
    """Metrics that fit what the outputs are, gathered batch by batch; F1 is that of the ``positive`` class."""

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
        """The next rows."""
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
        """The figures by name; of several labels their means."""
        found = [one.result() for one in self._each]
        if len(found) < 2:
            return {**dict(*found), **({"positive": self._positive} if any("f1" in one for one in found) else {})}
        return {name: float(np.mean([one[name] for one in found])) for name in ("accuracy", "log_loss", "auc", "f1")}
