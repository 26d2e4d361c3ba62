"""Temporal efficiency: which of two runs had the better model, averaged over the time that both ran."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

from paragrad.errors import UsageError
from paragrad.rundir import record
from paragrad.types import Event

Curve = list[tuple[float, float]]
"""Seconds and accuracy, in order of time."""


def accuracy(events: Iterable[Event], *, name: str = "the run") -> Curve:
    """Return the validation accuracy over time, without validations after a checkpoint that the run was resumed from."""
    looks = [look for look in record.validations(events) if math.isfinite(look.data.get("accuracy", math.nan))]
    curve = sorted((look.time, float(look.data["accuracy"])) for look in looks)
    if len(curve) < 2:
        raise UsageError(
            f"Temporal efficiency needs the accuracy of {name} over time, but its record has {len(curve)} validations with an "
            "accuracy, and at least 2 are needed. Train with validation rows, and validate more often (--validate-every)."
        )
    return curve


def efficiency(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """Return E(a, b) = ∫₀ᵐ f_a dt / ∫₀ᵐ f_b dt, with f accuracy over time and m the length of the shorter run (Hermans 2017).

    Above 1, ``a`` was ahead on average. The integrals are trapezoids between validations; before the first validation, the
    accuracy is assumed to rise linearly from 0. m is the time of the last validation of the run that ended first.
    """
    until = min(a[-1][0], b[-1][0])
    below = area(b, until)
    if below <= 0:
        raise UsageError(f"The second run had an accuracy of 0 in its first {until:g} s, so that it cannot be compared.")
    return area(a, until) / below


def area(curve: Sequence[tuple[float, float]], until: float) -> float:
    """Return ∫₀ᵐ f dt by trapezoids, the last one cut at ``until``."""
    points = [(0.0, 0.0), *curve] if curve[0][0] > 0 else list(curve)
    cut = bisect_left([time for time, _ in points], until)
    if cut < len(points):
        (before, low), (after, high) = points[max(cut - 1, 0)], points[cut]
        share = (until - before) / (after - before) if after > before else 1.0
        points = [*points[:cut], (until, low + share * (high - low))]
    return sum((t1 - t0) * (f0 + f1) / 2 for (t0, f0), (t1, f1) in pairwise(points))
