"""Metrics by name: the figures of ``pg.load(run).evaluate()``, computed in every validation of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from paragrad.config import options
from paragrad.errors import UsageError, unknown
from paragrad.evaluation.card import Head
from paragrad.evaluation.outputs import Array, Gathered, as_numpy, positive_of
from paragrad.learners.criterion import class_axis
from paragrad.learners.measured import Joins, Metric
from paragrad.models import ownfile

OF_CLASSES = ("accuracy", "log_loss", "auc", "f1", "f1_macro")
OF_NUMBERS = ("mse", "mae", "r2")
RESERVED = ("loss", "seconds", "epoch", "clock", "samples")
"""What an entry of the history has beside metrics."""

MetricsLike: TypeAlias = Mapping[str, Metric] | Sequence[str | Metric]
"""Metrics as users give them: functions by name; or a list of names and functions."""


@dataclass(frozen=True)
class Outputs:
    """What the outputs of a model are, as far as its metrics must know it."""

    head: Head
    loss: Any = None
    axis: int | None = None
    """The axis of the classes; None: that which the loss compares along."""
    classes: tuple[str, ...] | None = None
    in_units: Callable[[torch.Tensor], Array] = as_numpy
    """Numbers as the label has them."""


@dataclass
class Figures:
    """Some figures by name, gathered piece by piece with the weights of rows."""

    names: tuple[str, ...]
    of: Outputs
    positive: str | None = None
    """The class whose F1 is asked for; None: the one that is called signal, or else the second."""
    _gathered: Gathered | None = field(default=None, repr=False)

    def reset(self) -> None:
        """Begin anew."""
        self._gathered = None

    def update(self, output: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """The next rows."""
        if self._gathered is None:
            axis = class_axis(self.of.loss, output, target) if self.of.axis is None else self.of.axis
            self._gathered = Gathered(self.of.head, axis or 1, output, target, self.of.classes, self.positive)
        if self.of.head == "numbers":
            self._gathered.add(self.of.in_units(output), self.of.in_units(target), as_numpy(weight))
        else:
            self._gathered.add(output, target, as_numpy(weight))

    def compute(self) -> dict[str, float]:
        """Each figure of all rows."""
        found = {} if self._gathered is None else self._gathered.result()
        for name in self.names:
            if name not in found:
                there = ", ".join(key for key, value in found.items() if isinstance(value, float))
                raise UsageError(f"{name!r} has no meaning for these outputs. Available: {there}")
        return {name: found[name] for name in self.names}


def resolved(given: MetricsLike | None, outputs: Callable[[], Outputs]) -> dict[str, Metric]:
    """Metrics by name, from what a user gives; ``outputs`` is asked for where a name of ours is among them."""
    if given is None:
        return {}
    if isinstance(given, str):
        raise UsageError(f"metrics={given!r} is one text, but it is a list: write metrics=[{given!r}].")
    if isinstance(given, Mapping):
        found = dict(given)
        for name, metric in found.items():
            if not callable(metric) and not isinstance(metric, Joins):
                raise UsageError(
                    f"metrics[{name!r}] is {metric!r}, but it is a function of (output, target), or a metric with reset, "
                    f"update and compute. Names are given in a list: metrics=[{name!r}]."
                )
    else:
        found = _listed(given, outputs)
    for name in found:
        if name in RESERVED:
            raise UsageError(f"A metric is called {name!r}, which every entry of the history has: give it another name.")
    return found


def _listed(given: Sequence[str | Metric], outputs: Callable[[], Outputs]) -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    names: list[str] = []
    positive: str | None = None
    for one in given:
        if isinstance(one, str) and not ownfile.is_named(one):
            name, fields = options.split_fields(one)
            if name not in (*OF_CLASSES, *OF_NUMBERS):
                raise unknown("metric", name, [*OF_CLASSES, *OF_NUMBERS, "FILE.py:FUNCTION"])
            for key in fields:
                if key != "positive" or name != "f1":
                    raise UsageError(f"metric {one!r}: only f1 has a field, positive, the class that it is of.")
            positive = str(fields["positive"]) if fields else positive
            names.append(name)
            continue
        metric = ownfile.load(one, "metric") if isinstance(one, str) else one
        metric = metric() if isinstance(metric, type) else metric
        if not callable(metric) and not isinstance(metric, Joins):
            raise UsageError(f"metrics has {one!r}, which is neither a name nor a function of (output, target).")
        found[str(getattr(metric, "__name__", type(metric).__name__))] = metric
    if names:
        of = outputs()
        _check(names, positive, of)
        found[", ".join(names)] = Figures(tuple(dict.fromkeys(names)), of, positive)
    return found


def _check(names: Sequence[str], positive: str | None, of: Outputs) -> None:
    """Raise where a name has no meaning for what the model puts out."""
    if of.head in ("value", "raw"):
        raise UsageError(
            f"metrics={list(names)}, but nothing says what the model puts out: give functions of (output, target)."
        )
    known = OF_NUMBERS if of.head == "numbers" else OF_CLASSES
    for name in names:
        if name not in known:
            what = "predicts numbers" if of.head == "numbers" else "chooses among classes"
            raise UsageError(f"metric {name!r}, but the model {what}. Available: {', '.join(known)}.")
        if name == "log_loss" and of.head == "scores":
            raise UsageError("metric 'log_loss' needs probabilities, which a loss of your own does not tell: give a function.")
    if positive is not None and of.classes is not None:
        positive_of(positive, of.classes)


def positive_in(metrics: Mapping[str, Metric]) -> str | None:
    """The class whose F1 was asked for."""
    return next((metric.positive for metric in metrics.values() if isinstance(metric, Figures)), None)
