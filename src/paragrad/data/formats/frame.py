"""Tables in memory: a pandas or polars frame, told by what it can do, or a dict of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paragrad.data.formats.file import TEXT, Array, Column, Jagged, even, rows_of_a_piece
from paragrad.errors import UsageError


def is_frame(thing: Any) -> bool:
    """Whether it is a frame of named columns, as those of pandas and polars."""
    return (
        hasattr(thing, "columns") and hasattr(thing, "__getitem__") and hasattr(thing, "to_numpy") and hasattr(thing, "dtypes")
    )


def columns_of(frame: Any) -> dict[str, Any]:
    """The columns of a frame by name."""
    return {str(name): frame[name] for name in frame.columns}


class Frame:
    """Named arrays of one length."""

    def __init__(self, columns: Mapping[str, Any], name: str) -> None:
        self.name = name
        self.columns: dict[str, Column] = {}
        self.aside: dict[str, str] = {}
        self.index: tuple[str, ...] = ()
        self._arrays: dict[str, Array | Jagged] = {}
        rows, first = -1, ""
        for key, values in columns.items():
            array = _array(values)
            length = len(array.counts) if isinstance(array, Jagged) else len(array)
            if rows < 0:
                rows, first = length, key
            if length != rows:
                raise UsageError(
                    f"Column {first!r} of {name} has {rows:,} rows, but {key!r} has {length:,}: give each as many."
                )
            column = _column(array)
            if column is None:
                self.aside[key] = _why(array)
            else:
                self.columns[key], self._arrays[key] = column, array
        self._size = rows_of_a_piece(self.columns.values())
        self.lengths = even(max(rows, 0), self._size)

    def read(self, piece: int, names: Sequence[str]) -> dict[str, Array | Jagged]:
        """Some columns of a piece."""
        start = piece * self._size
        return {name: _part(self._arrays[name], start, start + self._size) for name in names}

    def close(self) -> None:
        """Nothing is open."""


def _array(values: Any) -> Array | Jagged:
    try:
        array = values.to_numpy() if hasattr(values, "to_numpy") else np.asarray(values)
    except ValueError:
        return Jagged.of(values)  # lists of different lengths
    if array.dtype == object and getattr(getattr(values, "dtype", None), "kind", "O") in "biuf":
        return np.asarray(values.to_numpy(dtype=np.float64, na_value=np.nan))  # a type of pandas' own, with gaps
    if (
        array.dtype == object
        and len(array)
        and all(hasattr(value, "__len__") and not isinstance(value, str) for value in array)
    ):
        lengths = {len(value) for value in array}
        return np.stack([np.asarray(value) for value in array]) if len(lengths) == 1 else Jagged.of(array)
    if array.dtype.kind in "UT":
        return np.asarray(array, dtype=object)
    return np.asarray(array)


def _column(array: Array | Jagged) -> Column | None:
    if isinstance(array, Jagged):
        return Column(array.values.dtype, jagged=True) if array.values.dtype.kind in "biuf" else None
    if array.dtype == object:
        return Column(TEXT) if array.ndim == 1 and all(isinstance(value, str) for value in array) else None
    return Column(array.dtype.newbyteorder("="), array.shape[1:]) if array.dtype.kind in "biuf" else None


def _why(array: Array | Jagged) -> str:
    """Why an array is no column."""
    if isinstance(array, Jagged) or array.dtype != object or array.ndim > 1:
        return f"it is of type {array.values.dtype if isinstance(array, Jagged) else array.dtype}"
    row = next(row for row, value in enumerate(array) if not isinstance(value, str))
    return f"it holds {array[row]!r} in row {row}, which is no text"


def _part(array: Array | Jagged, start: int, stop: int) -> Array | Jagged:
    if not isinstance(array, Jagged):
        return array[start:stop]
    ends = np.cumsum(array.counts)
    begin = int(ends[start - 1]) if start else 0
    end = int(ends[min(stop, len(ends)) - 1]) if len(ends) else 0
    return Jagged(array.values[begin:end], array.counts[start:stop])
