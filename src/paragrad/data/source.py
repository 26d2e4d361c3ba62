"""Where rows come from: arrays that are indexed at once, or a Dataset that is asked row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import default_collate

from paragrad.data.plan import OrderedPlan, Plan, Rows
from paragrad.errors import UsageError

TARGETS = ("y", "target", "targets", "label", "labels")
"""Keys of a dict batch that hold what is to be predicted."""


@runtime_checkable
class Source(Protocol):
    """A number of rows, any of which can be read as one mini-batch. One of your own can be given wherever rows are taken; it
    travels to the workers by pickle."""

    def __len__(self) -> int: ...

    def batch(self, rows: Rows) -> Any:
        """Return these rows, in this order, as one mini-batch."""


class Selected:
    """Some rows of a source of the user's own."""

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
        """Where the source reports warnings."""
        return getattr(self.source, "report", lambda message: None)

    @report.setter
    def report(self, report: Callable[[str], None]) -> None:
        if isinstance(self.source, Reporting):
            self.source.report = report


@dataclass(frozen=True)
class Weighted:
    """Rows with a weight each, which may be negative: row i counts ``weight[i]`` times in the loss."""

    rows: Any
    """The rows as they would be without weights: (x, y), or any other nesting."""
    weight: Any


@runtime_checkable
class Orderly(Protocol):
    """A source whose rows are best, or only, had in the order of a plan of its own."""

    def plan(self, *, batch_size: int, epochs: int, seed: int) -> Plan:
        """In which order its rows are to be trained on."""

    def at(self, plan: Plan, position: int) -> Any:
        """The mini-batch at a position."""

    def example(self, rows: int) -> Any:
        """So many rows like those that will come, to warm up on."""


@runtime_checkable
class Reporting(Protocol):
    """A source that has something to tell the user while it is read."""

    report: Callable[[str], None]
    """Called with a warning; set by the process that reads the rows."""


class ReportHere:
    """A function of this process: what travels to another one is a function that does nothing."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def __call__(self, message: str) -> None:
        self._report(message)

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return ReportHere, (_to_nobody,)


def _to_nobody(message: str) -> None:
    """Report to nobody: the process that reads the rows sets its own."""


@dataclass(frozen=True)
class Order:
    """In which order the rows of a source come, as a DataLoader says it."""

    shuffled: bool = True
    drop_last: bool = False
    """Whether a last mini-batch that is short is left out of every epoch."""


class Arrays:
    """A tuple, list or dict of arrays (nested as you like) with one first dimension."""

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
        """A part of the rows, as arrays of their own."""
        return Arrays(self.batch(rows), self.order)


class Items:
    """A torch map-style Dataset, whose rows are read one by one and made a mini-batch by ``collate``.

    dataset   anything with ``__len__`` and ``__getitem__``
    collate   makes a mini-batch of a list of items, as the ``collate_fn`` of a DataLoader; it may pad to the longest of them
    rows      which items; by default all
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
        """Whether all mini-batches of one size have one shape: a collate of the user's own may pad each differently."""
        return self.collate is default_collate

    def __len__(self) -> int:
        return len(self.dataset) if self.rows is None else len(self.rows)

    def batch(self, rows: Rows) -> Any:
        chosen = rows if self.rows is None else self.rows[rows]
        return self.collate([self.dataset[int(row)] for row in chosen])

    def select(self, rows: Rows) -> Items:
        """A part of the rows; the dataset itself is shared."""
        chosen = rows if self.rows is None else self.rows[rows]
        return Items(self.dataset, collate=self.collate, rows=chosen, order=self.order)


def leaves(tree: Any) -> list[torch.Tensor]:
    """All tensors of a nested tuple, list or dict, in order; weights last."""
    if isinstance(tree, Weighted):
        return [*leaves(tree.rows), tree.weight]
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, tuple | list):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The same nesting with every leaf replaced."""
    if isinstance(tree, Weighted):
        return Weighted(mapped(tree.rows, function), function(tree.weight))
    if isinstance(tree, Mapping):
        return {key: mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(mapped(value, function) for value in tree)
    return function(tree)


def joined(trees: Sequence[Any]) -> Any:
    """Rows of several trees of one nesting, one after another."""
    if len(trees) == 1:
        return trees[0]
    columns = iter([torch.cat(parts) for parts in zip(*(leaves(tree) for tree in trees), strict=True)])
    return mapped(trees[0], lambda _: next(columns))


def target_key(tree: Mapping[Any, Any]) -> str:
    """The key of what is to be predicted."""
    for key in TARGETS:
        if key in tree:
            return key
    raise UsageError(f"A dict batch needs its target under one of {', '.join(TARGETS)}; it has {', '.join(map(str, tree))}.")


def target_of(tree: Any) -> Any:
    """What is to be predicted: the last of a tuple, the target key of a dict; a lone array is its own target."""
    if isinstance(tree, Weighted):
        return target_of(tree.rows)
    if isinstance(tree, Mapping):
        return tree[target_key(tree)]
    return tree[-1] if isinstance(tree, tuple | list) else tree


def all_rows(source: Source, batch_size: int) -> Iterator[Rows]:
    """The rows of a source in order, cut into mini-batches."""
    total = len(source)
    return (np.arange(start, min(start + batch_size, total), dtype=np.int64) for start in range(0, total, batch_size))


def batch_at(source: Source, plan: Plan, position: int) -> Any:
    """The mini-batch at a position of a plan."""
    at = getattr(source, "at", None)  # looking for a protocol would take as long as gathering the rows
    return source.batch(plan.rows_of(position)) if at is None else at(plan, position)


def example(source: Source, plan: Plan) -> Any:
    """A mini-batch to warm up on."""
    return source.example(plan.size_of(0)) if isinstance(source, Orderly) else source.batch(plan.rows_of(0))


def plan_of(source: Source, *, batch_size: int, epochs: int, seed: int) -> Plan:
    """The plan for a source: its own, where it has one, else one permutation of all rows for each epoch."""
    if isinstance(source, Orderly):
        return source.plan(batch_size=batch_size, epochs=epochs, seed=seed)
    order = getattr(source, "order", None)
    if order is not None and order != Order():
        return OrderedPlan.over(len(source), order.shuffled, order.drop_last, batch_size=batch_size, epochs=epochs, seed=seed)
    return Plan(rows=len(source), batch_size=batch_size, epochs=epochs, seed=seed)
