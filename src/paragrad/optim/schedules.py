"""Learning-rate schedules by global progress: what the rate is multiplied with when so much of a run's rows is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from paragrad.config import options
from paragrad.errors import UsageError

ScheduleLike: TypeAlias = str | Callable[[float], float]
"""A name with fields (``"cosine:warmup=0.05"``), or a function from the share of the run that is done to a factor."""


FIRST = 0.01
"""The factor at the first step of a warm-up: at 0 the step would be made in vain."""


@dataclass(frozen=True)
class Schedule:
    """A factor for the learning rate, from the share of the run's mini-batches that have been used (0 to 1)."""

    warmup: float = field(default=0.0, kw_only=True)
    """Share of the run over which the rate first rises, in a straight line from 1 % of it."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise UsageError(f"warmup={self.warmup}, but it is a share of the run: 0 <= warmup < 1, such as 0.05.")

    def __call__(self, progress: float) -> float:
        """The factor at this share of the run."""
        if progress < self.warmup:
            return FIRST + (1 - FIRST) * progress / self.warmup
        return self.after((min(progress, 1.0) - self.warmup) / (1 - self.warmup))

    def after(self, progress: float) -> float:
        """The factor at this share of what follows the warm-up."""
        return 1.0


@dataclass(frozen=True)
class Warmup(Schedule):
    """Rises over the warm-up, then stays."""

    warmup: float = field(default=0.05, kw_only=True)


@dataclass(frozen=True)
class Falling(Schedule):
    """One that comes down to a floor."""

    floor: float = 0.0
    """The factor at the end of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise UsageError(f"floor={self.floor}, but it is a share of the rate: 0 <= floor <= 1, such as 0.1.")


@dataclass(frozen=True)
class Linear(Falling):
    """In a straight line from 1 to the floor."""

    def after(self, progress: float) -> float:
        return 1.0 - (1.0 - self.floor) * progress


@dataclass(frozen=True)
class Cosine(Falling):
    """Half a period of a cosine, from 1 to the floor: slowly, then fast, then slowly."""

    def after(self, progress: float) -> float:
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Exponential(Falling):
    """By the same factor for every equal share of the run, from 1 to the floor."""

    floor: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.floor:
            raise UsageError("floor=0, but an exponential never comes to 0: take a floor above it, such as 0.01.")

    def after(self, progress: float) -> float:
        return float(self.floor**progress)


@dataclass(frozen=True)
class Step(Schedule):
    """Times ``factor`` at each of some moments, constant between them."""

    at: tuple[float, ...] | str = (0.5, 0.75)
    """The shares of the run after which the rate falls; as text 0.5+0.75."""
    factor: float = 0.1
    """What the rate is multiplied with at each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        moments = self._moments()
        if not moments or any(not 0 < moment < 1 for moment in moments) or list(moments) != sorted(set(moments)):
            raise UsageError(f"at={self.at!r}, but these are shares of the run in rising order, such as 0.5+0.75.")
        if not 0 < self.factor <= 1:
            raise UsageError(f"factor={self.factor}, but it must be 0 < factor <= 1, such as 0.1.")
        object.__setattr__(self, "at", moments)

    def _moments(self) -> tuple[float, ...]:
        given: Any = self.at.split("+") if isinstance(self.at, str) else self.at
        try:
            return tuple(float(moment) for moment in (given if isinstance(given, list | tuple) else (given,)))
        except ValueError:
            return ()

    def after(self, progress: float) -> float:
        return self.factor ** sum(1 for moment in self.at if progress >= float(moment))


TABLE: dict[str, type[Schedule]] = {kind.__name__.lower(): kind for kind in (Cosine, Linear, Step, Exponential, Warmup)}


class _Table:
    """The schedules by name, as ``options.parse`` looks them up."""

    def names(self) -> tuple[str, ...]:
        return tuple(TABLE)

    def load(self, name: str) -> type[Schedule]:
        return TABLE[name]


def build(given: ScheduleLike) -> Callable[[float], float]:
    """The schedule behind a name; a function is its own."""
    if isinstance(given, str):
        made: Schedule = options.parse(given, "schedule", _Table())
        return made
    if not callable(given):
        raise UsageError(
            f"schedule={given!r} is neither a name nor a function. Give a name ('cosine:warmup=0.05') or a function from the "
            "share of the run that is done (0 to 1) to a factor (lambda done: 1 - done)."
        )
    return given


def checked(schedule: Callable[[float], float], progress: float) -> float:
    """The factor at this share of the run; raises where it is no factor."""
    factor = schedule(progress)
    try:
        sound = math.isfinite(factor) and factor >= 0
    except TypeError:
        sound = False
    if not sound:
        raise UsageError(
            f"The schedule gives {factor!r} where {progress:.4g} of the run is done; it must give a number that the learning "
            "rate is multiplied with, 0 or more."
        )
    return float(factor)
