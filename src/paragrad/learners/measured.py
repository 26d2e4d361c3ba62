"""Metrics of the user's own: of all rows at once, or piece by piece where a metric says how pieces are joined."""

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
    """A metric that joins pieces itself, as those of torchmetrics do. ``update`` may take the weights of rows as ``weight``."""

    def reset(self) -> None:
        """Begin anew."""

    def update(self, output: Any, target: Any, /) -> None:
        """The next rows."""

    def compute(self) -> Any:
        """The figure of all rows; a mapping where there are several."""


Metric: TypeAlias = Callable[[Any, Any], Any] | Joins
"""A function (output, target) -> number of all rows at once, or a metric that joins pieces."""


class Measured:
    """The metrics of one validation. One that raises is NaN, and ``report`` is told why: it must not cost the model."""

    def __init__(self, metrics: Mapping[str, Metric], report: Callable[[str], None]) -> None:
        self._joining = {name: metric for name, metric in metrics.items() if isinstance(metric, Joins)}
        self._whole = {name: metric for name, metric in metrics.items() if name not in self._joining}
        self._names = {name: getattr(metric, "names", (name,)) for name, metric in metrics.items()}
        self._report = report
        self._found: dict[str, float] = {}
        self._kept: list[Any] = []
        for name, metric in list(self._joining.items()):
            self._tried(name, metric.reset)

    def add(self, output: Any, target: Any, weight: torch.Tensor | None) -> None:
        """The next rows; what is kept of them is on the CPU."""
        if not self._names:
            return
        output, target = mapped((output, target), _home)
        for name, metric in list(self._joining.items()):
            weights = {"weight": _home(weight)} if "weight" in _further(metric) else {}
            self._tried(name, lambda metric=metric, weights=weights: metric.update(output, target, **weights))  # type: ignore[misc]
        if self._whole:
            self._kept.append((output, target))

    def result(self) -> dict[str, float]:
        """Every figure by name."""
        for name, metric in list(self._joining.items()):
            self._tried(name, lambda name=name, metric=metric: self._put(name, metric.compute()))  # type: ignore[misc]
        for name, function in self._whole.items():
            self._tried(name, lambda name=name, function=function: self._put(name, function(*self._all())))  # type: ignore[misc]
        return {each: self._found.get(each, math.nan) for names in self._names.values() for each in names} | self._found

    def _all(self) -> Any:
        """Output and target of all rows."""
        if len(self._kept) > 1:
            try:
                self._kept = [joined(self._kept)]
            except (RuntimeError, TypeError) as error:
                raise UsageError(
                    f"the outputs of mini-batches cannot be joined ({error}): give a metric with reset, update and compute"
                ) from error
        return self._kept[0]

    def _put(self, name: str, value: Any) -> None:
        self._found |= {str(key): float(each) for key, each in (value if isinstance(value, Mapping) else {name: value}).items()}

    def _tried(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a function of the user's, which may raise anything
            self._joining.pop(name, None)
            self._report(f"The metric {name!r} raised {type(error).__name__}: {error}")


def _home(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def _further(metric: Joins) -> tuple[str, ...]:
    """The names of what ``update`` takes beside output and target."""
    return tuple(inspect.signature(metric.update).parameters)[2:]
