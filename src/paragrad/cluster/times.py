"""Times: constant, drawn from a distribution, or taken from a recorded run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from paragrad.errors import UsageError

Numbers: TypeAlias = npt.NDArray[np.float64]

BLOCK = 64
"""Number of draws that are made at a time."""
WIDEST = 10.0
"""Largest sigma of a log-normal: with more, draws would be zero or infinite."""


@dataclass(frozen=True)
class Exponential:
    """Exponentially distributed (memoryless) times: mostly short, sometimes long."""

    mean: float
    """Mean in seconds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", positive("mean", self.mean, "a number of seconds"))

    def block(self, generator: np.random.Generator) -> Numbers:
        """Return the next draws."""
        return generator.exponential(self.mean, BLOCK)


@dataclass(frozen=True)
class LogNormal:
    """Log-normal times: half the median is as likely as twice the median, with a tail of long times."""

    mean: float
    """Mean in seconds (of the times, not of their logarithms)."""
    sigma: float
    """Standard deviation of the logarithm; 0.1 is a spread of about 10 %."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", positive("mean", self.mean, "a number of seconds"))
        object.__setattr__(self, "sigma", not_negative("sigma", self.sigma, "a number"))
        if self.sigma > WIDEST:
            raise UsageError(f"sigma={self.sigma}, but it must be at most {WIDEST:g}.")

    def block(self, generator: np.random.Generator) -> Numbers:
        """Return the next draws."""
        return generator.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, BLOCK)


@dataclass(frozen=True)
class Uniform:
    """Times between two limits, all equally likely."""

    low: float
    """Shortest time in seconds."""
    high: float
    """Longest time in seconds."""

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            object.__setattr__(self, name, not_negative(name, getattr(self, name), "a number of seconds"))
        if self.high < self.low:
            raise UsageError(f"low={self.low} is above high={self.high}: give the shorter time first.")

    @property
    def mean(self) -> float:
        """Mean in seconds."""
        return (self.low + self.high) / 2

    def block(self, generator: np.random.Generator) -> Numbers:
        """Return the next draws."""
        return generator.uniform(self.low, self.high, BLOCK)


@dataclass(frozen=True)
class Trace:
    """Recorded times in their order, repeated when they are used up.

    In text, ``trace('runs/mine', 2)`` takes the step times of worker 2 in a run.
    """

    seconds: tuple[float, ...]
    """Recorded times in seconds."""

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, Sequence) or isinstance(self.seconds, str) or not self.seconds:
            raise UsageError(f"seconds={self.seconds!r}, but a trace must be a list of at least one number of seconds.")
        what = "a number of seconds"
        times = (not_negative(f"seconds[{place}]", value, what) for place, value in enumerate(self.seconds))
        object.__setattr__(self, "seconds", tuple(times))

    @property
    def mean(self) -> float:
        """Mean in seconds."""
        return math.fsum(self.seconds) / len(self.seconds)

    @staticmethod
    def of(path: str | Path, worker: int) -> Trace:
        """Return the mean step time in each commit of one worker of a run; ``path`` is the run directory or its record."""
        from paragrad.rundir.record import read  # loads torch, which this module does not need otherwise

        commits = [event.data for event in read(path) if event.kind == "commit" and event.data["steps"] > 0]
        seconds = tuple(data["seconds"] / data["steps"] for data in commits if data["worker"] == worker)
        if not seconds:
            there = ", ".join(str(rank) for rank in sorted({data["worker"] for data in commits})) or "none"
            raise UsageError(f"There is no commit of worker {worker} in {str(path)!r}. Workers with commits: {there}.")
        return Trace(seconds)


Time: TypeAlias = float | Exponential | LogNormal | Uniform | Trace
"""A time in seconds: a constant, or values to draw from."""

TIMES: dict[str, type[Exponential] | type[LogNormal] | type[Uniform] | type[Trace]] = {
    "exponential": Exponential,
    "lognormal": LogNormal,
    "uniform": Uniform,
    "trace": Trace,
}
"""Times that are not constant, by their names in text and TOML."""


class Draws:
    """A sequence of times, which does not depend on how calls group them."""

    def __init__(self, block: Callable[[], Sequence[float]]) -> None:
        self._block = block
        self._values: Sequence[float] = ()
        self._used = 0

    def next(self) -> float:
        """Return the next time."""
        if self._used == len(self._values):
            self._values, self._used = self._block(), 0
        value = self._values[self._used]
        self._used += 1
        return value

    def total(self, count: int) -> float:
        """Return the sum of the next ``count`` times, added in order: ``total(2)`` is ``next() + next()`` to the last bit."""
        total = 0.0
        while count > 0:
            if self._used == len(self._values):
                self._values, self._used = self._block(), 0
            taken = self._values[self._used : self._used + count]
            for value in taken:  # the built-in sum rounds differently from Python 3.12 on
                total += value
            self._used += len(taken)
            count -= len(taken)
        return total


class Same(Draws):
    """A constant time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def next(self) -> float:
        """Return the time."""
        return self._seconds

    def total(self, count: int) -> float:
        """Return ``count`` times the time."""
        return count * self._seconds


def draws(time: Time, key: tuple[int, ...]) -> Draws:
    """Return the times for a key: the n-th depends only on the key and on n."""
    if isinstance(time, float | int):
        return Same(float(time))
    if isinstance(time, Trace):
        return Draws(lambda: time.seconds)
    generator = np.random.default_rng(key)
    return Draws(lambda: time.block(generator).tolist())


def mean_of(time: Time) -> float:
    """Return the mean of a time in seconds."""
    return float(time) if isinstance(time, float | int) else time.mean


def a_time(name: str, value: object) -> Time:
    """Return a time; raise for any other value."""
    if isinstance(value, Exponential | LogNormal | Uniform | Trace):
        return value
    return not_negative(name, value, "a number of seconds (or a time such as LogNormal(1.0, 0.5))")


def not_negative(name: str, value: object, what: str) -> float:
    """Return a finite number, 0 or more; raise for any other value."""
    number = _number(value)
    if not 0 <= number < math.inf:
        raise UsageError(f"{name}={value!r}, but it must be {what}, 0 or more and finite.")
    return number


def positive(name: str, value: object, what: str) -> float:
    """Return a finite number above 0; raise for any other value."""
    number = _number(value)
    if not 0 < number < math.inf:
        raise UsageError(f"{name}={value!r}, but it must be {what}, above 0 and finite.")
    return number


def _number(value: object) -> float:
    """Return a value as a float; NaN if it is not a number."""
    try:
        return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        return math.nan
