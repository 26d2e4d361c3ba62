"""Nested arrays as users give them: convert every leaf to a tensor, and name the leaf in errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from paragrad.data.labels import Meaning, is_text
from paragrad.data.source import Weighted, find_target, is_whole, leaves, mapped
from paragrad.errors import UsageError

CHECKED = 65_536
"""Rows that are checked for NaN at a time, so that the check needs little memory."""
NARROW = {"float64": "float32", "float128": "float32", "uint16": "int32", "uint32": "int64", "uint64": "int64"}
"""Types of arrays that are converted."""


def batch_of(data: Any, what: str) -> Any:
    """Convert and check one mini-batch, or one piece of a file, like arrays."""
    tree = as_tree(data, what)
    check_rows(tree, what)
    return tree


def as_tree(data: Any, what: str, meaning: Meaning | None = None) -> Any:
    """Return the same nesting with every array a tensor with rows. ``meaning`` tells how to read the targets."""
    if isinstance(data, Weighted):
        return Weighted(as_tree(data.rows, what, meaning), _weights(data.weight, what))
    if meaning is not None:
        data = _number_classes(data, what, meaning)
    tree = converted(data, what)
    if not leaves(tree):
        raise UsageError(f"{what} is empty: give at least one array.")
    labels = as_labels if meaning is None else lambda leaf: meaning.of_numbers(as_labels(leaf))
    if isinstance(tree, dict):
        target = find_target(tree)  # None is allowed: a loss of (model, batch) may need no target
        return {key: mapped(value, labels) if key == target else value for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tree[0] if len(tree) == 1 else (*tree[:-1], mapped(tree[-1], labels))
    return tree


def _number_classes(data: Any, what: str, meaning: Meaning) -> Any:
    """Return the data with class names in the target replaced by class numbers."""
    if isinstance(data, dict):
        key = find_target(data)
        if key is not None and is_text(data[key]):
            return {**data, key: meaning.of_text(np.asarray(data[key]), f"{what}[{key!r}]")}
    elif isinstance(data, tuple | list) and len(data) > 1 and is_text(data[-1]):
        return (*data[:-1], meaning.of_text(np.asarray(data[-1]), f"{what}[{len(data) - 1}]"))
    return data


def as_inputs(tree: Any, notes: list[str], name: str) -> Any:
    """Return the tree with inputs of bytes as float32, like those of files: images from 0 to 1, other numbers unscaled."""

    def as_floats(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.dtype != torch.uint8:
            return leaf
        if leaf.ndim < 3:
            return leaf.float()
        notes.append(f"The images of {name} are bytes: they are scaled to float32 from 0 to 1.")
        # NumPy in float32 gives the same bits as for bytes in a file.
        return torch.from_numpy(np.divide(leaf.numpy(), np.float32(255), dtype=np.float32))

    if isinstance(tree, Weighted):
        return Weighted(as_inputs(tree.rows, notes, name), tree.weight)
    if isinstance(tree, dict):
        target = find_target(tree)
        return {key: value if key == target else mapped(value, as_floats) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return (*(mapped(value, as_floats) for value in tree[:-1]), tree[-1])
    return mapped(tree, as_floats)


def _weights(data: Any, what: str) -> torch.Tensor:
    weight = converted(data, f"{what}.weight")
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        raise UsageError(f"{what}.weight must be one array with one number per row.")
    return weight.float()


def converted(data: Any, where: str) -> Any:
    """Return the same nesting with every array as a tensor."""
    if isinstance(data, dict):
        return {key: converted(value, f"{where}[{key!r}]") for key, value in data.items()}
    if isinstance(data, tuple) or (isinstance(data, list) and _holds_arrays(data)):
        return tuple(converted(value, f"{where}[{index}]") for index, value in enumerate(data))
    leaf = data.detach().cpu() if isinstance(data, torch.Tensor) else _tensor(_array(data, where), where)
    if not leaf.ndim:
        raise UsageError(f"{where} is a single number, but it must be an array with one row per example.")
    return leaf


def _holds_arrays(values: list[Any]) -> bool:
    return any(
        _holds_arrays(value) if isinstance(value, list) else isinstance(value, tuple | dict) or hasattr(value, "__array__")
        for value in values
    )


def _array(data: Any, where: str) -> np.ndarray[Any, Any]:
    if isinstance(data, np.ma.MaskedArray):
        raise UsageError(f"{where} is a masked array, and its mask would be lost: fill it, as by {where}.filled(0).")
    if isinstance(data, str | bytes) or not (isinstance(data, list | int | float) or hasattr(data, "__array__")):
        raise UsageError(f"{where} is a {type(data).__name__}, but it must be a NumPy array or a torch tensor.")
    try:
        return np.asarray(data)
    except ValueError as error:
        raise UsageError(f"{where} is a ragged list ({error}): give every row the same length.") from error


def _tensor(array: np.ndarray[Any, Any], where: str) -> torch.Tensor:
    if array.dtype.kind not in "biufc":
        raise UsageError(
            f"{where} is of type {array.dtype}, but a model can be trained on numbers only: convert it to numbers of one type, "
            "as by .astype('float32')."
        )
    name = array.dtype.newbyteorder("=").name
    array = np.asarray(array, dtype=NARROW.get(name, name))
    if array.ndim:
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        # torch warns about writing to a read-only array, but sources are only read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.from_numpy(array)


def as_labels(leaf: torch.Tensor) -> torch.Tensor:
    """Return whole-number targets as int64, others unchanged."""
    return leaf.to(torch.int64) if is_whole(leaf) else leaf


def named_leaves(tree: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every leaf with its name, such as data[0]['x']."""
    if isinstance(tree, Weighted):
        yield from named_leaves(tree.rows, where)
        yield f"{where}.weight", tree.weight
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from named_leaves(value, f"{where}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for index, value in enumerate(tree):
            yield from named_leaves(value, f"{where}[{index}]")
    else:
        yield where, tree


def check_rows(tree: Any, what: str) -> None:
    """Raise if leaves differ in length, are empty, or hold NaN or infinity."""
    first, length = "", -1
    for where, leaf in named_leaves(tree, what):
        if length < 0:
            first, length = where, len(leaf)
        if len(leaf) != length:
            raise UsageError(f"{first} has {length:,} rows, but {where} has {len(leaf):,}: give every row its target.")
        if not length:
            raise UsageError(f"{where} has no rows (its shape is {tuple(leaf.shape)}).")
        if not leaf.numel():
            raise UsageError(f"{where} has rows without a value (its shape is {tuple(leaf.shape)}).")
        _check_finite(leaf, where)


def _check_finite(leaf: torch.Tensor, where: str) -> None:
    if not leaf.is_floating_point():
        return
    rows: list[int] = []
    for start in range(0, len(leaf), CHECKED):
        part = leaf[start : start + CHECKED]
        if not torch.isfinite(part.sum()):
            bad = ~torch.isfinite(part).reshape(len(part), -1).all(1)
            rows += (start + bad.nonzero().reshape(-1)).tolist()
    if rows:
        raise UsageError(
            f"{where} has NaN or infinity in {len(rows):,} of {len(leaf):,} rows, first in row {rows[0]}. "
            "Leave these rows out, or put a number in their place."
        )
