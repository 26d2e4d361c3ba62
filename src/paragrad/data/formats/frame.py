"""Tables in memory: a dict of arrays, or a frame. pandas and polars frames are recognised by their methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paragrad.data.formats.file import TEXT, Array, Column, File, Jagged, even, rows_of_a_piece
from paragrad.errors import UsageError


def is_frame(thing: Any) -> bool:
    """Return whether this is a frame of named columns, such as those of pandas and polars."""
    return all(hasattr(thing, name) for name in ("columns", "__getitem__", "to_numpy", "dtypes"))


def columns_of(frame: Any) -> dict[str, Any]:
    """Return the columns of a frame by name."""
    return {str(name): frame[name] for name in frame.columns}


class Frame(File):
    """Named arrays of one length."""

    def __init__(self, columns: Mapping[str, Any], name: str) -> None:
        super().__init__(name)
        self._arrays: dict[str, Array | Jagged] = {}
        rows, first = -1, ""
        for key, values in columns.items():
            array = _array(values)
            if rows < 0:
                rows, first = len(array), key
            if len(array) != rows:
                raise UsageError(
                    f"Column {first!r} of {name} has {rows:,} rows, but {key!r} has {len(array):,}: give columns of one length."
                )
            column = _column(array)
            if column is None:
                self.aside[key] = _why(array)
            else:
                self.columns[key], self._arrays[key] = column, array
        self._size = rows_of_a_piece(self.columns.values())
        self.lengths = even(max(rows, 0), self._size)

    def read(self, piece: int, names: Sequence[str]) -> dict[str, Array | Jagged]:
        start = piece * self._size
        return {name: self._arrays[name][start : start + self._size] for name in names}


def _array(values: Any) -> Array | Jagged:
    try:
        array = values.to_numpy() if hasattr(values, "to_numpy") else np.asarray(values)
    except ValueError:
        return Jagged.of(values)  # lists of different lengths
    if array.dtype == object and getattr(getattr(values, "dtype", None), "kind", "O") in "biuf":
        return np.asarray(values.to_numpy(dtype=np.float64, na_value=np.nan))  # a pandas type with missing values
    nested = array.dtype == object and all(hasattr(value, "__len__") and not isinstance(value, str) for value in array)
    if nested and len(array):
        lengths = {len(value) for value in array}
        return np.stack([np.asarray(value) for value in array]) if len(lengths) == 1 else Jagged.of(array)
    return np.asarray(array, dtype=object if array.dtype.kind in "UT" else None)


def _column(array: Array | Jagged) -> Column | None:
    if isinstance(array, Jagged):
        return Column(array.values.dtype, jagged=True) if array.values.dtype.kind in "biuf" else None
    if array.dtype == object:
        return Column(TEXT) if array.ndim == 1 and all(isinstance(value, str) for value in array) else None
    return Column(array.dtype.newbyteorder("="), array.shape[1:]) if array.dtype.kind in "biuf" else None


def _why(array: Array | Jagged) -> str:
    """Return why an array is not a column."""
    if isinstance(array, Jagged):
        return f"it is of type {array.values.dtype}"
    if array.dtype != object or array.ndim > 1:
        return f"it is of type {array.dtype}"
    row = next(row for row, value in enumerate(array) if not isinstance(value, str))
    return f"it holds {array[row]!r} in row {row}, which is not text"
