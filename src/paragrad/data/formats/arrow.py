"""pyarrow, which reads CSV and Parquet: import it, and convert its columns to NumPy arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from paragrad.config.extras import command
from paragrad.data.formats.file import TEXT, Array, Column, Jagged
from paragrad.errors import UsageError


def library() -> Any:
    """Import and return pyarrow with the modules that are needed."""
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"pyarrow, which reads CSV and Parquet files, is not installed: {command('parquet')}") from None
    return pyarrow


def index_of(metadata: Mapping[bytes, bytes] | None) -> tuple[str, ...]:
    """Return the columns that pandas wrote as the index of its frame."""
    about = json.loads((metadata or {}).get(b"pandas", b"{}"))
    return tuple(name for name in about.get("index_columns", ()) if isinstance(name, str))


def column_of(kind: Any) -> Column | None:
    """Return an Arrow type as a column; None if it is not a number, text or a list of numbers."""
    types = library().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return Column(np.dtype(kind.to_pandas_dtype()))
    if types.is_null(kind) or types.is_decimal(kind):
        return Column(np.dtype(np.float64))
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return Column(TEXT)
    fixed = types.is_fixed_size_list(kind)
    if not (fixed or types.is_list(kind) or types.is_large_list(kind)):
        return None
    inner = column_of(kind.value_type)
    if inner is None or inner.jagged or inner.dtype == TEXT:
        return None
    if fixed:
        return Column(inner.dtype, (kind.list_size, *inner.shape))
    return None if inner.shape else Column(inner.dtype, jagged=True)


def array_of(values: Any, column: Column) -> Array | Jagged:
    """Return a chunked Arrow column as an array. Missing values become NaN, and whole numbers with gaps float64."""
    arrow = library()
    values = values.combine_chunks()
    if isinstance(values, arrow.ChunkedArray):
        values = arrow.concat_arrays(values.chunks) if values.num_chunks else arrow.array([], values.type)
    if arrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if column.jagged:
        counts = values.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        return Jagged(_numbers(values.flatten()), counts.astype(np.int64))
    if column.shape:
        flat = values
        for _ in column.shape:
            flat = flat.flatten()
        return _numbers(flat).reshape(len(values), *column.shape)
    if column.dtype == TEXT:
        return np.asarray(values.fill_null("").to_numpy(zero_copy_only=False), dtype=object)
    return _numbers(values)


def _numbers(values: Any) -> Array:
    arrow = library()
    if arrow.types.is_null(values.type) or arrow.types.is_decimal(values.type):
        values = values.cast(arrow.float64())
    if arrow.types.is_boolean(values.type) and values.null_count:
        values = values.cast(arrow.int8())
    return np.asarray(values.to_numpy(zero_copy_only=False))
