"""User-defined metrics: functions of all rows at once, or objects that join pieces themselves."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from paragrad.data.source import joined, mapped
from paragrad.errors import UsageError


@runtime_checkable
class Joins(Protocol):
    """A metric that joins pieces itself, as in torchmetrics. ``update`` may take the row weights as ``weight``."""

    def reset(self) -> None:
        """Start again without rows."""

    def update(self, output: Any, target: Any, /) -> None:
        """Add the next rows."""

    def compute(self) -> Any:
        """Return the metric of all rows; a mapping if there are several numbers."""


Metric: TypeAlias = Callable[[Any, Any], Any] | Joins
"""A function (output, target) -> number of all rows at once, or a metric that joins pieces."""


class Measured:
    """The metrics of one validation. A metric that raises is NaN, and ``report`` gets the error: the model must survive it."""

    def __init__(self, metrics: Mapping[str, Metric], report: Callable[[str], None]) -> None:
        self._joining = {name: metric for name, metric in metrics.items() if isinstance(metric, Joins)}
        self._whole = {name: metric for name, metric in metrics.items() if name not in self._joining}
        self._names = {name: getattr(metric, "names", (name,)) for name, metric in metrics.items()}
        self._report = report
        self._found: dict[str, float] = {}
        self._kept: list[Any] = []
        for name, metric in list(self._joining.items()):
            self._try(name, metric.reset)

    def add(self, output: Any, target: Any, weight: torch.Tensor | None) -> None:
        """Add the next rows; those that are kept are moved to the CPU."""
        if not self._names:
            return
        output, target = mapped((output, target), _on_cpu)
        for name, metric in list(self._joining.items()):
            further = tuple(inspect.signature(metric.update).parameters)[2:]
            weights = {"weight": _on_cpu(weight)} if "weight" in further else {}
            self._try(name, metric.update, output, target, **weights)
        if self._whole:
            self._kept.append((output, target))

    def result(self) -> dict[str, float]:
        """Return every metric by name."""
        for name, metric in list(self._joining.items()):
            self._try(name, self._put, name, metric.compute)
        for name, function in self._whole.items():
            self._try(name, self._put, name, lambda function=function: function(*self._all()))
        return {each: self._found.get(each, math.nan) for names in self._names.values() for each in names} | self._found

    def _all(self) -> Any:
        """Return output and target of all rows."""
        if len(self._kept) > 1:
            try:
                self._kept = [joined(self._kept)]
            except (RuntimeError, TypeError) as error:
                raise UsageError(
                    f"the outputs of mini-batches cannot be joined ({error}): give a metric with reset, update and compute"
                ) from error
        return self._kept[0]

    def _put(self, name: str, compute: Callable[[], Any]) -> None:
        value = compute()
        self._found |= {str(key): float(each) for key, each in (value if isinstance(value, Mapping) else {name: value}).items()}

    def _try(self, name: str, action: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        try:
            action(*arguments, **named)
        except Exception as error:  # a user-defined function may raise anything
            self._joining.pop(name, None)
            self._report(f"The metric {name!r} raised {type(error).__name__}: {error}")


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf
