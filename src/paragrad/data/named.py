"""Arrays as a table: rows without names of columns get those of the table that a model was trained on."""

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
    """Whether rows are given as arrays in memory, alone or nested."""
    rows = data.rows if isinstance(data, Weighted) else data
    return isinstance(rows, TensorDataset | tuple | list | dict | torch.Tensor) or hasattr(rows, "__array__")


def named(data: Any, columns: Mapping[str, Any], notes: list[str]) -> Table:
    """Arrays (x, (x, y), or either with weights) as a table with the ``columns`` of a training, in their order.

    ``columns`` has "features" and their "shapes", "label" and "weight". A dict with all features as keys is a table already.
    """
    features = list(columns["features"])
    rows, weight = (data.rows, data.weight) if isinstance(data, Weighted) else (data, None)
    x, y = _parts(rows, features)
    made = x if isinstance(x, dict) else _columns(_array(x), features, columns["shapes"])
    label = columns["label"] if columns["label"] is not None else _unused(features)
    if y is not None:
        made = made | {label: _array(y)}
    there = label if label in made else None
    if weight is None and columns["weight"] is not None and columns["weight"] not in made and there is not None:
        notes.append(f"The run was trained with weights ({columns['weight']!r}), but these rows have none: each counts 1.")
    name = columns["weight"] if columns["weight"] is not None else _unused([*features, label])
    if weight is not None:
        made = made | {name: _array(weight)}
    return Table(made, features=features, label=there, weight=name if name in made and there is not None else None)


def _parts(rows: Any, features: Sequence[str]) -> tuple[Any, Any]:
    """Inputs and label; the label is None where there is none, the inputs are a dict where columns come by name."""
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
                f"The rows are {len(rows)} arrays, but the run was trained on one table of the columns {_listed(features)}: "
                "give x, or (x, y)."
            )
        return rows[0], rows[1] if len(rows) == 2 else None
    return rows, None


def _columns(x: Array, features: Sequence[str], shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Every feature with its part of x."""
    if len(features) == 1 and (x.shape[1:] == tuple(shapes[0]) or len(shapes[0]) > 1):
        return {features[0]: _cleared(x)}
    widths = [math.prod(shape) for shape in shapes]
    if x.ndim != 2 or x.shape[1] != sum(widths):
        wrong = f"{x.shape[1]} columns" if x.ndim == 2 else f"the shape {x.shape[1:]} in each row"
        raise UsageError(
            f"The rows have {wrong}, but the run was trained on {sum(widths)} columns: {_listed(features)}. Give them in this "
            "order, or a frame or a file with these names."
        )
    ends = np.cumsum(widths)
    return {
        name: _cleared(x[:, end - width] if not shape else x[:, end - width : end])
        for name, shape, width, end in zip(features, shapes, widths, ends, strict=True)
    }


def _array(values: Any) -> Array:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _cleared(column: Array) -> Array:
    """A column of objects as the numbers that it holds; None is NaN. Text stays text."""
    if column.dtype != object or any(isinstance(value, str) for value in column.reshape(-1)):
        return column
    held = column.tolist()
    return np.asarray(held, dtype=np.float64 if None in held else None)


def _unused(names: Sequence[str]) -> str:
    """A name that no other column has."""
    return next(name for name in chain(["y"], (f"y{number}" for number in count())) if name not in names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + f", ... ({len(names)} in all)" * (len(names) > 12)
