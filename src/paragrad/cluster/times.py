"""How long something takes: always the same, drawn from a distribution, or as it was once recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TypeAlias

import numpy as np

from paragrad.errors import UsageError

BLOCK = 64
"""Draws that are made at a time; which number is the n-th does not depend on it being asked for alone."""
WIDEST = 10.0
"""The largest sigma of a log-normal: beyond it, draws are nothing but zeros and infinities."""


@dataclass(frozen=True)
class Exponential:
    """Times without a memory: mostly short, now and then long."""

    mean: float
    """Seconds on average."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", positive("mean", self.mean, "a number of seconds"))

    def block(self, generator: np.random.Generator) -> list[float]:
        """The next draws."""
        drawn: list[float] = generator.exponential(self.mean, BLOCK).tolist()
        return drawn


@dataclass(frozen=True)
class LogNormal:
    """Times that scatter by factors: as often half as long as twice as long, with a tail of long ones."""

    mean: float
    """Seconds on average: the mean of the times themselves, not of their logarithms."""
    sigma: float
    """Standard deviation of the logarithm; 0.1 scatters by about a tenth."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", positive("mean", self.mean, "a number of seconds"))
        object.__setattr__(self, "sigma", not_negative("sigma", self.sigma, "a number"))
        if self.sigma > WIDEST:
            raise UsageError(f"sigma={self.sigma}, but a log-normal time has at most {WIDEST:g}.")

    def block(self, generator: np.random.Generator) -> list[float]:
        """The next draws."""
        drawn: list[float] = generator.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, BLOCK).tolist()
        return drawn


@dataclass(frozen=True)
class Uniform:
    """Times anywhere between two, all equally likely."""

    low: float
    """The shortest, in seconds."""
    high: float
    """The longest, in seconds."""

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            object.__setattr__(self, name, not_negative(name, getattr(self, name), "a number of seconds"))
        if self.high < self.low:
            raise UsageError(f"low={self.low} is above high={self.high}: give the shorter time first.")

    @property
    def mean(self) -> float:
        """Seconds on average."""
        return (self.low + self.high) / 2

    def block(self, generator: np.random.Generator) -> list[float]:
        """The next draws."""
        drawn: list[float] = generator.uniform(self.low, self.high, BLOCK).tolist()
        return drawn


@dataclass(frozen=True)
class Trace:
    """Times as they were recorded, in that order; from the beginning again when they are used up.

    In text, ``trace('runs/mine', 2)`` takes how long the steps of worker 2 took in a run.
    """

    seconds: tuple[float, ...]
    """The recorded times, in seconds."""

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, Sequence) or isinstance(self.seconds, str) or not self.seconds:
            raise UsageError(f"seconds={self.seconds!r}, but a trace is a list of at least one number of seconds.")
        what = "a number of seconds"
        times = (not_negative(f"seconds[{place}]", value, what) for place, value in enumerate(self.seconds))
        object.__setattr__(self, "seconds", tuple(times))

    @property
    def mean(self) -> float:
        """Seconds on average."""
        return math.fsum(self.seconds) / len(self.seconds)

    @staticmethod
    def of(path: str | Path, worker: int) -> Trace:
        """How long the steps of one worker took in a run that was: one time for each of its commits.

        ``path`` is the run's directory, or its record.jsonl.
        """
        from paragrad.rundir.record import read  # loads torch, which nothing else here needs

        commits = [event.data for event in read(path) if event.kind == "commit" and event.data["steps"] > 0]
        seconds = tuple(data["seconds"] / data["steps"] for data in commits if data["worker"] == worker)
        if not seconds:
            there = ", ".join(str(rank) for rank in sorted({data["worker"] for data in commits})) or "none"
            raise UsageError(f"There is no commit of worker {worker} in {str(path)!r}. Workers with commits: {there}.")
        return Trace(seconds)


Time: TypeAlias = float | Exponential | LogNormal | Uniform | Trace
"""How long something takes, in seconds; a number: always so long."""

TIMES: dict[str, type[Exponential] | type[LogNormal] | type[Uniform] | type[Trace]] = {
    "exponential": Exponential,
    "lognormal": LogNormal,
    "uniform": Uniform,
    "trace": Trace,
}
"""Times that are not always the same, by their names in text and TOML."""


class Draws:
    """Times, one after another. How they are grouped into calls does not change them."""

    def __init__(self, block: Callable[[], Sequence[float]]) -> None:
        self._block = block
        self._values: Sequence[float] = ()
        self._used = 0

    def next(self) -> float:
        """The next time."""
        if self._used == len(self._values):
            self._values, self._used = self._block(), 0
        value = self._values[self._used]
        self._used += 1
        return value

    def total(self, count: int) -> float:
        """The next ``count`` times together, added in order: ``total(2)`` is ``next() + next()`` to the last bit."""
        total = 0.0
        while count > 0:
            if self._used == len(self._values):
                self._values, self._used = self._block(), 0
            taken = self._values[self._used : self._used + count]
            for value in taken:  # the built-in sum adds otherwise, from Python 3.12 on
                total += value
            self._used += len(taken)
            count -= len(taken)
        return total


class Same(Draws):
    """Always the same time, which costs nothing to draw."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def next(self) -> float:
        """The next time."""
        return self._seconds

    def total(self, count: int) -> float:
        """The next ``count`` times together."""
        return count * self._seconds


def draws(time: Time, key: tuple[int, ...]) -> Draws:
    """Times drawn for a key: the n-th depends on the key and on n alone."""
    if isinstance(time, float | int):
        return Same(float(time))
    if isinstance(time, Trace):
        return Draws(lambda: time.seconds)
    generator = np.random.default_rng(key)
    return Draws(lambda: time.block(generator))


def mean_of(time: Time) -> float:
    """Seconds on average."""
    return float(time) if isinstance(time, float | int) else time.mean


def a_time(name: str, value: object) -> Time:
    """A value that must be a time."""
    if isinstance(value, Exponential | LogNormal | Uniform | Trace):
        return value
    return not_negative(name, value, "a number of seconds (or a time such as LogNormal(1.0, 0.5))")


def not_negative(name: str, value: object, what: str) -> float:
    """A value that must be a finite number, 0 or more."""
    number = _number(value)
    if not 0 <= number < math.inf:
        raise UsageError(f"{name}={value!r}, but it is {what}, 0 or more and finite.")
    return number


def positive(name: str, value: object, what: str) -> float:
    """A value that must be a finite number above 0."""
    number = _number(value)
    if not 0 < number < math.inf:
        raise UsageError(f"{name}={value!r}, but it is {what}, above 0 and finite.")
    return number


def _number(value: object) -> float:
    """A value as a float; NaN where it is no number."""
    try:
        return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        return math.nan
