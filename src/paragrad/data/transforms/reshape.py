"""Change the shape of the numbers of a row, for example to an image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paragrad.data.transforms.transform import Column, Columns, Learned, Transform, place, wide
from paragrad.errors import UsageError


@dataclass(frozen=True)
class Reshape(Transform):
    """One column of the given shape. Several columns are joined in their order, under the name FIRST..LAST."""

    shape: tuple[int, ...] = ()
    """Shape of one row, such as (1,28,28)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)
        if not shape or any(not isinstance(size, int) or size < 1 for size in shape):
            raise UsageError(f"shape={self.shape} of reshape, but it must be the shape of one row, such as shape=(1,28,28).")
        object.__setattr__(self, "shape", shape)

    def apply(self, columns: Columns, chosen: Mapping[str, Learned], where: str) -> dict[str, Column]:
        names = list(chosen)
        joined_name = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
        flat = [wide(columns[name]) for name in names]
        for name, values in zip(names, flat, strict=True):
            if values.dtype.kind not in "biuf":
                raise UsageError(f"{place(name, where)} holds {values.dtype}, but reshape needs numbers.")
        width = sum(values.shape[1] for values in flat)
        if width != math.prod(self.shape):
            raise UsageError(
                f"{self.spelled()!r}: a row of {joined_name} has {width:,} numbers, but the shape {self.shape} needs "
                f"{math.prod(self.shape):,}."
            )
        joined = flat[0] if len(flat) == 1 else np.concatenate(flat, axis=1)
        made: dict[str, Column] = {}
        for name, values in columns.items():
            if name == names[0]:
                made[joined_name] = joined.reshape(len(values), *self.shape)
            elif name not in chosen:
                made[name] = values
        return made
