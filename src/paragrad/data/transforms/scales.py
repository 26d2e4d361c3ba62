"""Scale numbers: standardise them, map them to 0 to 1, clip them, or take a logarithm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from paragrad.data.transforms.statistics import WIDEST, Extremes, Moments, Quantiles
from paragrad.data.transforms.transform import Column, Learned, Study, Transform, finite, numbers, wide
from paragrad.errors import UsageError


@dataclass(frozen=True)
class _Affine(Transform):
    """(x - origin) / scale, where ``ORIGIN`` is the name of the origin among the learned values."""

    ORIGIN: ClassVar[str]

    def notes(self, name: str, learned: Learned) -> list[str]:
        constant = learned["constant"]
        count, total = int(np.sum(constant)), int(np.size(constant))
        if not count:
            return []
        what = f"is {learned[self.ORIGIN]}" if total == 1 else f"has {count} of {total} numbers that are the same"
        return [f"Column {name!r} {what} in every row of the training part: {self.name} makes it 0."]

    def change(self, name: str, values: Column, learned: Learned, where: str) -> dict[str, Column]:
        found = finite(values, name, self.name, where)
        return {name: (found - np.asarray(learned[self.ORIGIN])) / np.asarray(learned["scale"])}

    def invert(self, values: Column, learned: Learned) -> Column:
        return np.asarray(values.astype(np.float64) * np.asarray(learned["scale"]) + np.asarray(learned[self.ORIGIN]))


@dataclass(frozen=True)
class Standardise(_Affine):
    """(x - mean) / standard deviation, for each number in a row; a constant column becomes 0."""

    ORIGIN: ClassVar[str] = "mean"

    def study(self, name: str, values: Column) -> Study:
        return _Spread(name)


@dataclass(frozen=True)
class MinMax(_Affine):
    """(x - least) / (greatest - least): from 0 to 1 on the training part; other rows may exceed this range."""

    ORIGIN: ClassVar[str] = "least"

    def study(self, name: str, values: Column) -> Study:
        return _Range(name)


@dataclass(frozen=True)
class Clip(Transform):
    """Values below ``low`` become ``low``, values above ``high`` become ``high``."""

    low: float | str | None = None
    """A number, or a quantile of the training part such as 1%; none: no bound."""
    high: float | str | None = None
    """A number, or a quantile of the training part such as 99%; none: no bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = {key: value for key in ("low", "high") if (value := getattr(self, key)) is not None}
        if not bounds:
            raise UsageError("clip needs low= or high=: a number, or a share of the rows such as 1%.")
        for key, value in bounds.items():
            share = _share(value)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
            if not (is_number if share is None else 0 <= share <= 1):
                raise UsageError(
                    f"{key}={value!r} of clip, but it must be a number, or a share of the rows such as 1%, from 0% to 100%."
                )
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
        return {name: np.clip(found, low, high)}


@dataclass(frozen=True)
class Log(Transform):
    """sign(x) (log(abs(x) + offset) - log(offset)): logarithmic above the offset, about linear below it."""

    offset: float = 1.0
    """Size of x at which the curve changes from linear to logarithmic; with 1, it is log1p for positive x."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.offset > 0 and math.isfinite(self.offset)):
            raise UsageError(f"offset={self.offset} of log, but it must be a number above 0.")

    def change(self, name: str, values: Column, learned: Learned, where: str) -> dict[str, Column]:
        found = numbers(values, name, self.name, where)
        return {name: np.copysign(np.log1p(np.abs(found) / self.offset), found)}

    def invert(self, values: Column, learned: Learned) -> Column:
        found = values.astype(np.float64)
        return np.copysign(np.expm1(np.abs(found)) * self.offset, found)


class _Spread(Study):
    def __init__(self, name: str) -> None:
        self._name = name
        self._moments = Moments()
        self._extremes = Extremes()

    def add(self, values: Column) -> None:
        found = finite(values, self._name, "standardise")
        self._moments.add(found)
        self._extremes.add(found)

    def learned(self) -> Learned:
        constant = np.asarray(self._extremes.least == self._extremes.greatest)
        # The least value of a constant column is exact; its mean may be rounded.
        mean = np.where(constant, self._extremes.least, self._moments.mean)
        scale = self._moments.deviation
        constant = constant | (scale == 0)
        _check_size(scale, self._name)
        return {"mean": mean.tolist(), "scale": np.where(constant, 1.0, scale).tolist(), "constant": constant.tolist()}


class _Range(Study):
    def __init__(self, name: str) -> None:
        self._name = name
        self._extremes = Extremes()

    def add(self, values: Column) -> None:
        self._extremes.add(finite(values, self._name, "minmax"))

    def learned(self) -> Learned:
        least, greatest = np.asarray(self._extremes.least), np.asarray(self._extremes.greatest)
        constant = least == greatest
        with np.errstate(over="ignore"):
            scale = np.where(constant, 1.0, greatest - least)
        _check_size(scale, self._name)
        return {"least": least.tolist(), "scale": scale.tolist(), "constant": constant.tolist()}


class _Quantiles(Study):
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
    """Return one quantile search per number in a row."""
    width = math.prod(values.shape[1:])
    if width > WIDEST:
        raise UsageError(
            f"Column {name!r} has {width:,} numbers in a row, but {user} learns quantiles of at most {WIDEST}. Give numbers "
            "instead of quantiles."
        )
    return [Quantiles(shares) for _ in range(width)]


def _check_size(scale: Column, name: str) -> None:
    if not np.isfinite(scale).all():
        raise UsageError(f"Column {name!r} has numbers that are too large to scale: clip it first, or leave it out.")


def _share(value: Any) -> float | None:
    if not isinstance(value, str) or not value.endswith("%"):
        return None
    try:
        return float(value[:-1]) / 100
    except ValueError:
        return None
