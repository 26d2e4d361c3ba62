"""Where rows come from: arrays that are indexed at once, or a Dataset that is asked row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from paragrad.data.plan import Rows
from paragrad.errors import UsageError

TARGETS = ("y", "target", "targets", "label", "labels")
"""Keys of a dict batch that hold what is to be predicted."""


class Source(Protocol):
    """A number of rows, any of which can be had as one mini-batch."""

    def __len__(self) -> int: ...

    def batch(self, rows: Rows) -> Any:
        """These rows, in this order, as one mini-batch."""


class Arrays:
    """A tuple, list or dict of arrays (nested as you like) with one first dimension."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self._length = len(leaves(tree)[0])

    def __len__(self) -> int:
        return self._length

    def batch(self, rows: Rows) -> Any:
        index = torch.from_numpy(np.ascontiguousarray(rows))
        return mapped(self.tree, lambda leaf: leaf.index_select(0, index))

    def select(self, rows: Rows) -> Arrays:
        """A part of the rows, as arrays of their own."""
        return Arrays(self.batch(rows))


class Items:
    """A torch map-style Dataset."""

    def __init__(self, dataset: Any, rows: Rows | None = None, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset = dataset
        self.rows = rows
        self.collate = collate

    def __len__(self) -> int:
        return len(self.dataset) if self.rows is None else len(self.rows)

    def batch(self, rows: Rows) -> Any:
        chosen = rows if self.rows is None else self.rows[rows]
        return self.collate([self.dataset[int(row)] for row in chosen])

    def select(self, rows: Rows) -> Items:
        """A part of the rows; the dataset itself is shared."""
        return Items(self.dataset, rows if self.rows is None else self.rows[rows], self.collate)


def leaves(tree: Any) -> list[torch.Tensor]:
    """All tensors of a nested tuple, list or dict, in order."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, tuple | list):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The same nesting with every leaf replaced."""
    if isinstance(tree, dict):
        return {key: mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(mapped(value, function) for value in tree)
    return function(tree)


def target_key(tree: dict[Any, Any]) -> str:
    """The key of what is to be predicted."""
    for key in TARGETS:
        if key in tree:
            return key
    raise UsageError(f"A dict batch needs its target under one of {', '.join(TARGETS)}; it has {', '.join(map(str, tree))}.")


def target_of(tree: Any) -> Any:
    """What is to be predicted: the last of a tuple, the target key of a dict; a lone array is its own target."""
    if isinstance(tree, dict):
        return tree[target_key(tree)]
    return tree[-1] if isinstance(tree, tuple | list) else tree


def all_rows(source: Source, batch_size: int) -> list[Rows]:
    """The rows of a source in order, cut into mini-batches."""
    rows = np.arange(len(source), dtype=np.int64)
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
