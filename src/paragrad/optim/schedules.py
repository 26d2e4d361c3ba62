"""Learning-rate schedules: factors of the rate as functions of the global progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from paragrad.config import options
from paragrad.errors import UsageError

ScheduleLike: TypeAlias = str | Callable[[float], float]
"""A name with fields (``"cosine:warmup=0.05"``), or a function from the completed share of the run to a factor."""

FIRST = 0.01
"""Factor at the first step of a warm-up; with 0 that step would have no effect."""


@dataclass(frozen=True)
class Schedule:
    """A factor of the learning rate as a function of the share of the run's mini-batches already used (0 to 1)."""

    warmup: float = field(default=0.0, kw_only=True)
    """Share of the run over which the rate first rises linearly, from 1 %."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise UsageError(f"warmup={self.warmup}, but it must be a share of the run: 0 <= warmup < 1, such as 0.05.")

    def __call__(self, progress: float) -> float:
        """Return the factor at this share of the run."""
        if progress < self.warmup:
            return FIRST + (1 - FIRST) * progress / self.warmup
        return self.after((min(progress, 1.0) - self.warmup) / (1 - self.warmup))

    def after(self, progress: float) -> float:
        """Return the factor at this share of the run after the warm-up."""
        return 1.0


@dataclass(frozen=True)
class Warmup(Schedule):
    """Rise over the warm-up, then stay constant."""

    warmup: float = field(default=0.05, kw_only=True)


@dataclass(frozen=True)
class Falling(Schedule):
    """Base of the schedules that fall to a floor."""

    floor: float = 0.0
    """Factor at the end of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise UsageError(f"floor={self.floor}, but it must be a share of the rate: 0 <= floor <= 1, such as 0.1.")


@dataclass(frozen=True)
class Linear(Falling):
    """Fall linearly from 1 to the floor."""

    def after(self, progress: float) -> float:
        return 1.0 - (1.0 - self.floor) * progress


@dataclass(frozen=True)
class Cosine(Falling):
    """Fall from 1 to the floor along half a period of a cosine: slowly, then fast, then slowly."""

    def after(self, progress: float) -> float:
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Exponential(Falling):
    """Fall from 1 to the floor, by the same factor for every equal share of the run."""

    floor: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.floor:
            raise UsageError("floor=0, but an exponential never reaches 0: use a floor above 0, such as 0.01.")

    def after(self, progress: float) -> float:
        return float(self.floor**progress)


@dataclass(frozen=True)
class Step(Schedule):
    """Multiply by ``factor`` at each of these moments; constant between them."""

    at: tuple[float, ...] | str = (0.5, 0.75)
    """Shares of the run after which the rate falls; as text 0.5+0.75."""
    factor: float = 0.1
    """Factor at each of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.at.split("+") if isinstance(self.at, str) else self.at
        try:
            moments = tuple(float(moment) for moment in (given if isinstance(given, list | tuple) else (given,)))
        except ValueError:
            moments = ()
        if not moments or any(not 0 < moment < 1 for moment in moments) or list(moments) != sorted(set(moments)):
            raise UsageError(f"at={self.at!r}, but it must be shares of the run in rising order, such as 0.5+0.75.")
        if not 0 < self.factor <= 1:
            raise UsageError(f"factor={self.factor}, but it must be 0 < factor <= 1, such as 0.1.")
        object.__setattr__(self, "at", moments)

    def after(self, progress: float) -> float:
        return self.factor ** sum(1 for moment in self.at if progress >= float(moment))


TABLE: dict[str, type[Schedule]] = {kind.__name__.lower(): kind for kind in (Cosine, Linear, Step, Exponential, Warmup)}


class _Table:
    """The schedules by name, for ``options.parse``."""

    def names(self) -> tuple[str, ...]:
        return tuple(TABLE)

    def load(self, name: str) -> type[Schedule]:
        return TABLE[name]


def build(given: ScheduleLike) -> Callable[[float], float]:
    """Return the schedule of a name; a function is returned as it is."""
    if isinstance(given, str):
        made: Schedule = options.parse(given, "schedule", _Table())
        return made
    if not callable(given):
        raise UsageError(
            f"schedule={given!r} is neither a name nor a function. Give a name ('cosine:warmup=0.05') or a function from the "
            "completed share of the run (0 to 1) to a factor (lambda done: 1 - done)."
        )
    return given


def checked(schedule: Callable[[float], float], progress: float) -> float:
    """Return the factor at this share of the run; raise if it is not a number of at least 0."""
    factor = schedule(progress)
    try:
        valid = math.isfinite(factor) and factor >= 0
    except TypeError:
        valid = False
    if not valid:
        raise UsageError(
            f"The schedule returns {factor!r} for progress {progress:.4g}; it must return a factor of the learning rate, a "
            "number of at least 0."
        )
    return float(factor)
