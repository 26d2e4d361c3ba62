"""Metrics by name: those of ``pg.load(run).evaluate()``, computed in every validation of a run."""

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
"""Keys of a history entry that are not metrics."""

MetricsLike: TypeAlias = Mapping[str, Metric] | Sequence[str | Metric]
"""A user's metrics: functions by name, or a list of names and functions."""


@dataclass(frozen=True)
class Outputs:
    """Properties of a model's outputs that its metrics need."""

    head: Head
    loss: Any = None
    axis: int | None = None
    """Axis of the classes; None: the one along which the loss compares."""
    classes: tuple[str, ...] | None = None
    in_units: Callable[[torch.Tensor], Array] = as_numpy
    """Function that converts numbers to the units of the label."""


@dataclass
class Figures:
    """Some metrics by name, gathered piece by piece with the row weights."""

    names: tuple[str, ...]
    of: Outputs
    positive: str | None = None
    """Class for F1; None: the class called signal, or else the second."""
    _gathered: Gathered | None = field(default=None, repr=False)

    def reset(self) -> None:
        """Start again without rows."""
        self._gathered = None

    def update(self, output: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Add the next rows."""
        if self._gathered is None:
            axis = class_axis(self.of.loss, output, target) if self.of.axis is None else self.of.axis
            self._gathered = Gathered(self.of.head, axis or 1, output, target, self.of.classes, self.positive)
        convert = self.of.in_units if self.of.head == "numbers" else lambda values: values
        self._gathered.add(convert(output), convert(target), as_numpy(weight))

    def compute(self) -> dict[str, float]:
        """Return each metric of all rows."""
        found = {} if self._gathered is None else self._gathered.result()
        for name in self.names:
            if name not in found:
                available = ", ".join(key for key, value in found.items() if isinstance(value, float))
                raise UsageError(f"{name!r} has no meaning for these outputs. Available: {available}")
        return {name: found[name] for name in self.names}


def resolved(given: MetricsLike | None, outputs: Callable[[], Outputs]) -> dict[str, Metric]:
    """Return the user's metrics by name; ``outputs`` is called only if a built-in metric is among them."""
    if given is None:
        return {}
    if isinstance(given, str):
        raise UsageError(f"metrics={given!r} is a string, but it must be a list: write metrics=[{given!r}].")
    if isinstance(given, Mapping):
        found = dict(given)
        for name, metric in found.items():
            if not callable(metric) and not isinstance(metric, Joins):
                raise UsageError(
                    f"metrics[{name!r}] is {metric!r}, but it must be a function of (output, target), or a metric with reset, "
                    f"update and compute. Give names in a list: metrics=[{name!r}]."
                )
    else:
        found = _listed(given, outputs)
    for name in found:
        if name in RESERVED:
            raise UsageError(f"A metric is called {name!r}, which is a key of every history entry: give it another name.")
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
                    raise UsageError(f"metric {one!r}: only f1 has a field: positive, its class.")
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
    """Raise if a metric has no meaning for the model's outputs."""
    if of.head in ("value", "raw"):
        raise UsageError(
            f"metrics={list(names)}, but the meaning of the model's outputs is unknown: give functions of (output, target)."
        )
    known = OF_NUMBERS if of.head == "numbers" else OF_CLASSES
    for name in names:
        if name not in known:
            what = "predicts numbers" if of.head == "numbers" else "chooses among classes"
            raise UsageError(f"metric {name!r}, but the model {what}. Available: {', '.join(known)}.")
        if name == "log_loss" and of.head == "scores":
            raise UsageError("metric 'log_loss' needs probabilities, which a user-defined loss does not give: use a function.")
    if positive is not None and of.classes is not None:
        positive_of(positive, of.classes)


def positive_in(metrics: Mapping[str, Metric]) -> str | None:
    """Return the class whose F1 the user asked for."""
    return next((metric.positive for metric in metrics.values() if isinstance(metric, Figures)), None)
