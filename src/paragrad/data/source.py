"""Sources of rows: arrays that are indexed at once, or a Dataset that is read row by row."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import default_collate

from paragrad.data.plan import OrderedPlan, Plan, Rows
from paragrad.errors import UsageError

TARGETS = ("y", "target", "targets", "label", "labels")
"""Keys of a dict batch, or names of columns, that hold the target."""
IGNORED = -100
"""Class label that torch losses ignore."""


@runtime_checkable
class Source(Protocol):
    """A number of rows, any of which can be read as one mini-batch.

    You can give your own source wherever rows are expected. It travels to the workers by pickle.
    """

    def __len__(self) -> int: ...

    def batch(self, rows: Rows) -> Any:
        """Return these rows, in this order, as one mini-batch."""


class Selected:
    """Some rows of a user-defined source."""

    def __init__(self, source: Source, rows: Rows) -> None:
        self.source = source
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: Rows) -> Any:
        return self.source.batch(self.rows[rows])

    def select(self, rows: Rows) -> Selected:
        """Return a part of the rows."""
        return Selected(self.source, self.rows[rows])

    @property
    def report(self) -> Callable[[str], None]:
        """Function that the source calls with warnings."""
        return getattr(self.source, "report", _ignore)

    @report.setter
    def report(self, report: Callable[[str], None]) -> None:
        if isinstance(self.source, Reporting):
            self.source.report = report


@dataclass(frozen=True)
class Weighted:
    """Rows with one weight each, which may be negative: row i counts ``weight[i]`` times in the loss."""

    rows: Any
    """The rows without weights: (x, y), or any other nesting."""
    weight: Any


@runtime_checkable
class Orderly(Protocol):
    """A source that defines the order in which its rows are read."""

    def plan(self, *, batch_size: int, epochs: int, seed: int) -> Plan:
        """Return the order in which to train on its rows."""

    def at(self, plan: Plan, position: int) -> Any:
        """Return the mini-batch at a position."""

    def example(self, rows: int) -> Any:
        """Return a mini-batch of ``rows`` typical rows, to warm up on."""


@runtime_checkable
class Reporting(Protocol):
    """A source that reports warnings while it is read."""

    report: Callable[[str], None]
    """Called with a warning; set by the process that reads the rows."""


class ReportHere:
    """A function that is called in this process only: pickled, it becomes a function that does nothing."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def __call__(self, message: str) -> None:
        self._report(message)

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return ReportHere, (_ignore,)


def _ignore(message: str) -> None: ...


@dataclass(frozen=True)
class Order:
    """Order of the rows of a source, as a DataLoader defines it."""

    shuffled: bool = True
    drop_last: bool = False
    """True if every epoch leaves out a last mini-batch that is too short."""


class Arrays:
    """A tuple, list or dict of arrays, nested to any depth, with the same first dimension."""

    def __init__(self, tree: Any, order: Order | None = None) -> None:
        self.tree = tree
        self.order = order
        self._length = len(leaves(tree)[0])

    def __len__(self) -> int:
        return self._length

    def batch(self, rows: Rows) -> Any:
        index = torch.from_numpy(np.ascontiguousarray(rows))
        return mapped(self.tree, lambda leaf: leaf.index_select(0, index))

    def select(self, rows: Rows) -> Arrays:
        """Return a copy of some rows."""
        return Arrays(self.batch(rows), self.order)


class Items:
    """A torch map-style Dataset: rows are read one by one, and ``collate`` makes them a mini-batch.

    dataset   anything with ``__len__`` and ``__getitem__``
    collate   makes a mini-batch of a list of items, like the ``collate_fn`` of a DataLoader; it may pad to the longest item
    rows      numbers of the items to use; by default all
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[list[Any]], Any] = default_collate,
        rows: Rows | None = None,
        order: Order | None = None,
    ) -> None:
        self.dataset = dataset
        self.rows = rows
        self.collate = collate
        self.order = order

    @property
    def even(self) -> bool:
        """True if mini-batches of one size have one shape: a custom collate function may pad each differently."""
        return self.collate is default_collate

    def __len__(self) -> int:
        return len(self.dataset) if self.rows is None else len(self.rows)

    def batch(self, rows: Rows) -> Any:
        return self.collate([self.dataset[int(row)] for row in self._items(rows)])

    def select(self, rows: Rows) -> Items:
        """Return a part of the rows, of the same dataset."""
        return Items(self.dataset, collate=self.collate, rows=self._items(rows), order=self.order)

    def _items(self, rows: Rows) -> Rows:
        return rows if self.rows is None else self.rows[rows]


def leaves(tree: Any) -> list[torch.Tensor]:
    """Return all tensors of a nested tuple, list or dict, in order; weights last."""
    if isinstance(tree, Weighted):
        return [*leaves(tree.rows), tree.weight]
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, tuple | list):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return the same nesting with ``function`` applied to every leaf."""
    if isinstance(tree, Weighted):
        return Weighted(mapped(tree.rows, function), function(tree.weight))
    if isinstance(tree, Mapping):
        return {key: mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(mapped(value, function) for value in tree)
    return function(tree)


def joined(trees: Sequence[Any]) -> Any:
    """Return the rows of several trees of the same nesting, one after another."""
    if len(trees) == 1:
        return trees[0]
    columns = iter([torch.cat(parts) for parts in zip(*(leaves(tree) for tree in trees), strict=True)])
    return mapped(trees[0], lambda _: next(columns))


def row_types(tree: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and type of one row of every leaf."""
    return [(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves(tree)]


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds whole numbers."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def find_target(names: Container[Any]) -> str | None:
    """Return the key of a dict batch, or the name of a column, that holds the target; None if there is none."""
    return next((key for key in TARGETS if key in names), None)


def target_key(tree: Mapping[Any, Any]) -> str:
    """Return the key of the target of a dict batch."""
    key = find_target(tree)
    if key is None:
        raise UsageError(
            f"A dict batch needs its target under one of {', '.join(TARGETS)}; it has {', '.join(map(str, tree))}."
        )
    return key


def target_of(tree: Any) -> Any:
    """Return the target: the last of a tuple, the target key of a dict; a single array is its own target."""
    if isinstance(tree, Weighted):
        return target_of(tree.rows)
    if isinstance(tree, Mapping):
        return tree[target_key(tree)]
    return tree[-1] if isinstance(tree, tuple | list) else tree


def all_rows(source: Source, batch_size: int) -> Iterator[Rows]:
    """Yield the rows of a source in order, cut into mini-batches."""
    total = len(source)
    return (np.arange(start, min(start + batch_size, total), dtype=np.int64) for start in range(0, total, batch_size))


def batch_at(source: Source, plan: Plan, position: int) -> Any:
    """Return the mini-batch at a position of a plan."""
    at = getattr(source, "at", None)  # isinstance with a protocol takes as long as gathering the rows
    return source.batch(plan.rows_of(position)) if at is None else at(plan, position)


def example(source: Source, plan: Plan) -> Any:
    """Return a mini-batch to warm up on."""
    return source.example(plan.size_of(0)) if isinstance(source, Orderly) else source.batch(plan.rows_of(0))


def plan_of(source: Source, *, batch_size: int, epochs: int, seed: int) -> Plan:
    """Return the source's own plan if it has one, else one permutation of all rows per epoch."""
    if isinstance(source, Orderly):
        return source.plan(batch_size=batch_size, epochs=epochs, seed=seed)
    order = getattr(source, "order", None)
    if order is not None and order != Order():
        return OrderedPlan.over(len(source), order.shuffled, order.drop_last, batch_size=batch_size, epochs=epochs, seed=seed)
    return Plan(rows=len(source), batch_size=batch_size, epochs=epochs, seed=seed)
