"""Arrays as a table: arrays have no column names, so they get those of the table that a model was trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from paragrad.data.formats.file import Array
from paragrad.data.source import TARGETS, Weighted
from paragrad.data.table import Table
from paragrad.errors import UsageError


def are_arrays(data: Any) -> bool:
    """Return whether the rows are arrays in memory, single or nested."""
    rows = data.rows if isinstance(data, Weighted) else data
    return isinstance(rows, TensorDataset | tuple | list | dict | torch.Tensor) or hasattr(rows, "__array__")


def table_of(data: Any, columns: Mapping[str, Any], notes: list[str]) -> Table:
    """Return arrays (x, (x, y), or either with weights) as a table with the ``columns`` of a training, in their order.

    ``columns`` has the keys "features", "shapes" (of the features), "label" and "weight". A dict that has all features as
    keys keeps its columns.
    """
    features = list(columns["features"])
    rows, weights = (data.rows, data.weight) if isinstance(data, Weighted) else (data, None)
    x, y = _parts(rows, features)
    made = x if isinstance(x, dict) else _columns(_array(x), features, columns["shapes"])
    label = columns["label"] if columns["label"] is not None else _unused(features)
    weight = columns["weight"]
    if y is not None:
        made = made | {label: _array(y)}
    if weights is not None:
        weight = weight if weight is not None else _unused([*made, label])
        made = made | {weight: _array(weights)}
    if label not in made:
        return Table(made, features=features)
    if weight is not None and weight not in made:
        notes.append(f"The run was trained with weights ({weight!r}), but these rows have none: each row counts 1.")
        weight = None
    return Table(made, features=features, label=label, weight=weight)


def _parts(rows: Any, features: Sequence[str]) -> tuple[Any, Any]:
    """Return inputs and label. The label is None if there is none; the inputs are a dict if columns have names."""
    if isinstance(rows, TensorDataset):
        rows = rows.tensors
    if isinstance(rows, dict):
        if set(features) <= set(rows):
            return dict(rows), None
        targets = [key for key in rows if key in TARGETS]
        inputs = [key for key in rows if key not in TARGETS]
        if len(inputs) != 1 or len(targets) > 1:
            raise UsageError(
                f"The rows are arrays by name ({', '.join(map(str, rows))}), but the run was trained on the columns "
                f"{_listed(features)}: give those, or one array with them in this order."
            )
        return rows[inputs[0]], rows[targets[0]] if targets else None
    if isinstance(rows, tuple) or (isinstance(rows, list) and any(hasattr(part, "__array__") for part in rows)):
        if len(rows) not in (1, 2):
            raise UsageError(
                f"The rows are {len(rows)} arrays, but the run was trained on one table with the columns {_listed(features)}: "
                "give x, or (x, y)."
            )
        return rows[0], rows[1] if len(rows) == 2 else None
    return rows, None


def _columns(x: Array, features: Sequence[str], shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return every feature with its part of x."""
    if len(features) == 1 and (x.shape[1:] == tuple(shapes[0]) or len(shapes[0]) > 1):
        return {features[0]: _as_numbers(x)}
    widths = [math.prod(shape) for shape in shapes]
    if x.ndim != 2 or x.shape[1] != sum(widths):
        wrong = f"{x.shape[1]} columns" if x.ndim == 2 else f"the shape {x.shape[1:]} in each row"
        raise UsageError(
            f"The rows have {wrong}, but the run was trained on {sum(widths)} columns: {_listed(features)}. Give them in this "
            "order, or a frame or a file with these names."
        )
    ends = np.cumsum(widths)
    return {
        name: _as_numbers(x[:, end - width] if not shape else x[:, end - width : end])
        for name, shape, width, end in zip(features, shapes, widths, ends, strict=True)
    }


def _array(values: Any) -> Array:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _as_numbers(column: Array) -> Array:
    """Return a column of Python objects as numbers, with None as NaN. A column with text is returned unchanged."""
    if column.dtype != object or any(isinstance(value, str) for value in column.reshape(-1)):
        return column
    values = column.tolist()
    return np.asarray(values, dtype=np.float64 if None in values else None)


def _unused(names: Sequence[str]) -> str:
    return next(name for name in chain(["y"], (f"y{number}" for number in count())) if name not in names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + f", ... ({len(names)} in all)" * (len(names) > 12)
