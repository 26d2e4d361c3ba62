"""Missing values: NaN, or a number that marks them, such as -999 in the data of the Higgs challenge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paragrad.data.transforms.scales import quantiles
from paragrad.data.transforms.statistics import Moments
from paragrad.data.transforms.transform import Column, Learned, Study, Transform, numbers, wide
from paragrad.errors import UsageError


@dataclass(frozen=True)
class Missing(Transform):
    """Fills in missing values; NaN is always missing."""

    value: float | None = -999.0
    """The number that marks a missing value; none: only NaN does."""
    fill: float | Literal["mean", "median"] = "mean"
    """The replacement: a number, or the mean or the median of the values that the training part has."""
    flag: bool = False
    """True to add a column COLUMN_missing of 0 and 1 for each column with missing values in the training part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value is not None and math.isnan(self.value):
            raise UsageError("value=nan of missing: NaN is always missing, so write value=none.")
        if not (self.fill in ("mean", "median") if isinstance(self.fill, str) else math.isfinite(self.fill)):
            raise UsageError(f"fill={self.fill} of missing, but it must be a finite number, mean or median.")

    def study(self, name: str, values: Column) -> Study:
        return _Gaps(self, name, values)

    def change(self, name: str, values: Column, learned: Learned, where: str) -> dict[str, Column]:
        found = numbers(values, name, self.name, where)
        gaps = self.gaps(found)
        made = {name: np.where(gaps, np.asarray(learned["fill"]), found)}
        if learned["flag"]:
            made[f"{name}_missing"] = gaps.astype(np.float32)
        return made

    def gaps(self, values: Column) -> Column:
        """Return True for each missing value."""
        missing = np.isnan(values)
        return missing if self.value is None else missing | (values == self.value)


class _Gaps(Study):
    def __init__(self, transform: Missing, name: str, values: Column) -> None:
        self._transform = transform
        self._name = name
        self._shape = values.shape[1:]
        self._any = False
        self._moments = Moments()
        self._medians = quantiles((0.5,), values, name, transform.name) if transform.fill == "median" else []

    def add(self, values: Column) -> None:
        found = numbers(values, self._name, self._transform.name)
        gaps = self._transform.gaps(found)
        self._any |= bool(gaps.any())
        if np.isinf(found[~gaps]).any():
            raise UsageError(f"Column {self._name!r} has infinity: leave these rows out.")
        if self._transform.fill == "mean":
            self._moments.add(np.where(gaps, 0.0, found), ~gaps)
        flat, present = wide(found), ~wide(gaps)
        for place, one in enumerate(self._medians):
            one.add(flat[present[:, place], place])

    def again(self) -> bool:
        return max([one.again() for one in self._medians], default=False)

    def learned(self) -> Learned:
        fill = self._transform.fill
        counts = [one.count for one in self._medians] if fill == "median" else np.reshape(self._moments.count, -1)
        if isinstance(fill, str) and not np.all(counts):
            raise UsageError(
                f"Column {self._name!r} has no value in any row of the training part, so it has no {fill}. Leave the column "
                "out, or give a number: missing:fill=0."
            )
        if fill == "mean":
            value = self._moments.mean.tolist()
        elif fill == "median":
            value = np.array([one.values()[0] for one in self._medians]).reshape(self._shape).tolist()
        else:
            value = float(fill)
        return {"fill": value, "flag": self._any and self._transform.flag}
