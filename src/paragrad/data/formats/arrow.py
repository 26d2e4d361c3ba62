"""pyarrow, which reads CSV and Parquet: the library itself, and its columns as NumPy arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from paragrad.config.extras import command
from paragrad.data.formats.file import TEXT, Array, Column, Jagged
from paragrad.errors import UsageError


def library() -> Any:
    """pyarrow with what is needed of it."""
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"CSV and Parquet files are read by pyarrow, which is missing: {command('parquet')}") from None
    return pyarrow


def index_of(metadata: Mapping[bytes, bytes] | None) -> tuple[str, ...]:
    """The columns that pandas has written as the index of its frame."""
    about = json.loads((metadata or {}).get(b"pandas", b"{}"))
    return tuple(name for name in about.get("index_columns", ()) if isinstance(name, str))


def column_of(kind: Any) -> Column | None:
    """An Arrow type as a column; None where it is no number, text, or list of numbers."""
    types = library().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return Column(np.dtype(kind.to_pandas_dtype()))
    if types.is_null(kind) or types.is_decimal(kind):
        return Column(np.dtype(np.float64))
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return Column(TEXT)
    if types.is_fixed_size_list(kind):
        inner = column_of(kind.value_type)
        return (
            None
            if inner is None or inner.jagged or inner.dtype == TEXT
            else Column(inner.dtype, (kind.list_size, *inner.shape))
        )
    if types.is_list(kind) or types.is_large_list(kind):
        inner = column_of(kind.value_type)
        return None if inner is None or inner.shape or inner.jagged or inner.dtype == TEXT else Column(inner.dtype, jagged=True)
    return None


def array_of(values: Any, column: Column) -> Array | Jagged:
    """A chunked Arrow column as an array; what is missing is NaN, so whole numbers with gaps become float64."""
    arrow = library()
    values = values.combine_chunks()
    if isinstance(values, arrow.ChunkedArray):
        values = arrow.concat_arrays(values.chunks) if values.num_chunks else arrow.array([], values.type)
    if arrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if column.jagged:
        counts = values.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        return Jagged(_numbers(values.flatten(), column), counts.astype(np.int64))
    if column.shape:
        flat = values
        for _ in column.shape:
            flat = flat.flatten()
        return _numbers(flat, column).reshape(len(values), *column.shape)
    if column.dtype == TEXT:
        return np.asarray(values.fill_null("").to_numpy(zero_copy_only=False), dtype=object)
    return _numbers(values, column)


def _numbers(values: Any, column: Column) -> Array:
    arrow = library()
    if arrow.types.is_null(values.type) or arrow.types.is_decimal(values.type):
        values = values.cast(arrow.float64())
    if arrow.types.is_boolean(values.type) and values.null_count:
        values = values.cast(arrow.int8())
    return np.asarray(values.to_numpy(zero_copy_only=False))
