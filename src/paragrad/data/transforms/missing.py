"""Values that are not there: NaN, or a number that stands for it, such as -999 in the data of the Higgs challenge."""

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
    """Fills what is missing; NaN is always taken as missing."""

    value: float | None = -999.0
    """The number that stands for a missing one; none: only NaN does."""
    fill: float | Literal["mean", "median"] = "mean"
    """What comes in its place: a number, or the mean or the median of the rows of the training part that have one."""
    flag: bool = False
    """Whether a column COLUMN_missing of 0 and 1 says where: for each column with a gap in the training part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value is not None and math.isnan(self.value):
            raise UsageError("value=nan of missing: NaN is always taken as missing, so say value=none.")
        if isinstance(self.fill, str) and self.fill not in ("mean", "median"):
            raise UsageError(f"fill={self.fill!r} of missing, but it is a number, mean or median.")
        if not isinstance(self.fill, str) and not math.isfinite(self.fill):
            raise UsageError(f"fill={self.fill} of missing, but it is a finite number, mean or median.")

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
        """Where nothing is."""
        missing = np.isnan(values)
        return missing if self.value is None else missing | (values == self.value)


class _Gaps:
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
                f"Column {self._name!r} has no value in any row of the training part, so that there is no {fill}. Leave "
                "the column out, or give a number: missing:fill=0."
            )
        if fill == "mean":
            value = self._moments.mean.tolist()
        elif fill == "median":
            value = np.array([one.values()[0] for one in self._medians]).reshape(self._shape).tolist()
        else:
            value = float(fill)
        return {"fill": value, "flag": self._any and self._transform.flag}
