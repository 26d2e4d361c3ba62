"""Numbers on another scale: standardised, between 0 and 1, clipped, logarithmic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from paragrad.data.transforms.statistics import WIDEST, Extremes, Moments, Quantiles
from paragrad.data.transforms.transform import Column, Learned, Study, Transform, finite, numbers, wide
from paragrad.errors import UsageError


@dataclass(frozen=True)
class Standardise(Transform):
    """(x - mean) / standard deviation, of each number in a row; a column that never changes becomes 0."""

    def study(self, name: str, values: Column) -> Study:
        return _Spread(name)

    def notes(self, name: str, learned: Learned) -> list[str]:
        return _constant(self.name, name, learned["constant"], learned["mean"])

    def change(self, name: str, values: Column, learned: Learned, where: str) -> dict[str, Column]:
        found = finite(values, name, self.name, where)
        return {name: (found - np.asarray(learned["mean"])) / np.asarray(learned["scale"])}

    def invert(self, values: Column, learned: Learned) -> Column:
        return np.asarray(values.astype(np.float64) * np.asarray(learned["scale"]) + np.asarray(learned["mean"]))


@dataclass(frozen=True)
class MinMax(Transform):
    """(x - least) / (greatest - least): from 0 to 1 on the training part; other rows may go beyond."""

    def study(self, name: str, values: Column) -> Study:
        return _Range(name)

    def notes(self, name: str, learned: Learned) -> list[str]:
        return _constant(self.name, name, learned["constant"], learned["least"])

    def change(self, name: str, values: Column, learned: Learned, where: str) -> dict[str, Column]:
        found = finite(values, name, self.name, where)
        return {name: (found - np.asarray(learned["least"])) / np.asarray(learned["scale"])}

    def invert(self, values: Column, learned: Learned) -> Column:
        return np.asarray(values.astype(np.float64) * np.asarray(learned["scale"]) + np.asarray(learned["least"]))


@dataclass(frozen=True)
class Clip(Transform):
    """Values below ``low`` become ``low``, those above ``high`` become ``high``."""

    low: float | str | None = None
    """A number, or a share of the rows of the training part such as 1%; none: no bound."""
    high: float | str | None = None
    """A number, or a share of the rows of the training part such as 99%; none: no bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = {key: value for key in ("low", "high") if (value := getattr(self, key)) is not None}
        if not bounds:
            raise UsageError("clip needs low= or high=: a number, or a share of the rows such as 1%.")
        for key, value in bounds.items():
            share = _share(value)
            if isinstance(value, bool) or (share is None and not isinstance(value, int | float)):
                raise UsageError(f"{key}={value!r} of clip, but it is a number, or a share of the rows such as 1%.")
            if math.isnan(share if share is not None else float(value)) or not 0 <= (share or 0) <= 1:
                raise UsageError(f"{key}={value!r} of clip, but it is a number, or a share from 0% to 100%.")
        if len(bounds) == 2:
            low, high = _share(self.low), _share(self.high)
            if low is None and high is None:
                low, high = float(bounds["low"]), float(bounds["high"])
            if low is not None and high is not None and not low < high:
                raise UsageError(f"low={self.low} and high={self.high} of clip: low must be below high.")

    def study(self, name: str, values: Column) -> Study | None:
        shares = {key: share for key in ("low", "high") if (share := _share(getattr(self, key))) is not None}
        return _Quantiles(name, self.name, shares, values) if shares else None

    def change(self, name: str, values: Column, learned: Learned, where: str) -> dict[str, Column]:
        found = numbers(values, name, self.name, where)
        low, high = (learned.get(key, getattr(self, key)) for key in ("low", "high"))
        return {name: np.clip(found, _bound(low, -np.inf), _bound(high, np.inf))}


@dataclass(frozen=True)
class Log(Transform):
    """sign(x) (log(abs(x) + offset) - log(offset)): logarithmic beyond the offset, a line through 0 below it."""

    offset: float = 1.0
    """Where it turns from a line into a logarithm; with 1, log1p where x is positive."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.offset > 0 and math.isfinite(self.offset)):
            raise UsageError(f"offset={self.offset} of log, but it is a number above 0.")

    def change(self, name: str, values: Column, learned: Learned, where: str) -> dict[str, Column]:
        found = numbers(values, name, self.name, where)
        return {name: np.copysign(np.log1p(np.abs(found) / self.offset), found)}

    def invert(self, values: Column, learned: Learned) -> Column:
        found = values.astype(np.float64)
        return np.copysign(np.expm1(np.abs(found)) * self.offset, found)


class _Spread:
    def __init__(self, name: str) -> None:
        self._name = name
        self._moments = Moments()
        self._extremes = Extremes()

    def add(self, values: Column) -> None:
        found = finite(values, self._name, "standardise")
        self._moments.add(found)
        self._extremes.add(found)

    def again(self) -> bool:
        return False

    def learned(self) -> Learned:
        constant = np.asarray(self._extremes.least == self._extremes.greatest)
        # The least of a constant column is that value to the bit; a mean may be off by a rounding.
        mean = np.where(constant, self._extremes.least, self._moments.mean)
        scale = self._moments.deviation
        constant = constant | (scale == 0)
        _check_size(scale, self._name)
        return {"mean": mean.tolist(), "scale": np.where(constant, 1.0, scale).tolist(), "constant": constant.tolist()}


class _Range:
    def __init__(self, name: str) -> None:
        self._name = name
        self._extremes = Extremes()

    def add(self, values: Column) -> None:
        self._extremes.add(finite(values, self._name, "minmax"))

    def again(self) -> bool:
        return False

    def learned(self) -> Learned:
        least, greatest = np.asarray(self._extremes.least), np.asarray(self._extremes.greatest)
        constant = least == greatest
        with np.errstate(over="ignore"):
            scale = np.where(constant, 1.0, greatest - least)
        _check_size(scale, self._name)
        return {"least": least.tolist(), "scale": scale.tolist(), "constant": constant.tolist()}


class _Quantiles:
    def __init__(self, name: str, user: str, shares: dict[str, float], values: Column) -> None:
        self._about = (name, user)
        self._shares = shares
        self._shape = values.shape[1:]
        self._each = quantiles(tuple(shares.values()), values, name, user)

    def add(self, values: Column) -> None:
        found = wide(finite(values, *self._about))
        for place, one in enumerate(self._each):
            one.add(found[:, place])

    def again(self) -> bool:
        return max([one.again() for one in self._each])

    def learned(self) -> Learned:
        found = np.array([one.values() for one in self._each])
        return {key: found[:, place].reshape(self._shape).tolist() for place, key in enumerate(self._shares)}


def quantiles(shares: tuple[float, ...], values: Column, name: str, user: str) -> list[Quantiles]:
    """A search for each number in a row."""
    width = math.prod(values.shape[1:])
    if width > WIDEST:
        raise UsageError(
            f"Column {name!r} has {width:,} numbers in a row, but {user} learns quantiles of at most {WIDEST}. Give numbers "
            "instead."
        )
    return [Quantiles(shares) for _ in range(width)]


def _check_size(scale: Column, name: str) -> None:
    if not np.isfinite(scale).all():
        raise UsageError(f"Column {name!r} has numbers that are too large to be scaled: clip it before, or leave it out.")


def _share(value: Any) -> float | None:
    if not isinstance(value, str) or not value.endswith("%"):
        return None
    try:
        return float(value[:-1]) / 100
    except ValueError:
        return None


def _bound(value: Any, otherwise: float) -> Column:
    return np.asarray(otherwise if value is None else value, dtype=np.float64)


def _constant(user: str, name: str, constant: Any, value: Any) -> list[str]:
    count, of = int(np.sum(constant)), int(np.size(constant))
    if not count:
        return []
    what = f"is {value} in every row" if of == 1 else f"has {count} of {of} numbers that are the same in every row"
    return [f"Column {name!r} {what} of the training part: {user} makes it 0."]
