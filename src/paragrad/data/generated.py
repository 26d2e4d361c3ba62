"""Rows that come once, from a generator, a DataLoader or any other iterable of mini-batches: read by one process and dealt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from paragrad.data import seeds
from paragrad.data.arena import nested, picked
from paragrad.data.plan import Plan, Rows, SequentialPlan
from paragrad.data.source import Arrays, Weighted, leaves, mapped
from paragrad.data.trees import batch_of
from paragrad.errors import UsageError

Batches: TypeAlias = Iterator[Any]
COLLATED = 256
"""Rows of an IterableDataset that are read at a time."""


class Generated:
    """A source over what yields mini-batches; its rows are numbered as they come, and not shuffled.

    make    a function without arguments that returns a generator or another iterable of batches such as (x, y); or a
            DataLoader, an IterableDataset, or another iterable that can be begun again. A generator that has begun
            cannot be sent to another process: it is for engines of one process
    rows    how many rows make an epoch; or ``steps``: how many of its batches do, which are then of one size
    weighted  whether the last of each batch is the weight of its rows, as in (x, y, weight)
    """

    def __init__(self, make: Any, *, rows: int | None = None, steps: int | None = None, weighted: bool = False) -> None:
        if rows is not None and steps is not None:
            raise UsageError(f"rows={rows} and steps={steps} are both given, but an epoch is measured by one of them.")
        for name, value in (("rows", rows), ("steps", steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
                raise UsageError(f"{name}={value!r}, but it is a whole number of at least 1.")
        self._make, self.again = _factory(make)
        self.what = _named(make)
        self.weighted = weighted
        self._first: Batches = iter(())
        self.sample = self._look()
        length = len(leaves(self.sample)[0])
        found = rows if rows is not None else _rows_of(make) if steps is None else steps * length
        if found is None:
            raise UsageError(
                f"{self.what} does not say how many rows make an epoch: give pg.Generated(..., rows=...) or steps=..., its "
                "batches in an epoch."
            )
        self.rows = int(found)
        self.steps = -(-self.rows // length)
        self._forget()

    def _forget(self) -> None:
        """What belongs to one process."""
        self._floor: Callable[[], int] | None = None
        self._chunks: Iterator[Any] | None = None
        self._kept: deque[tuple[int, Any]] = deque()
        self._upto = 0

    def __getstate__(self) -> dict[str, Any]:
        own = ("_floor", "_chunks", "_kept", "_upto", "_first")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._first = iter(())
        self._forget()

    def __len__(self) -> int:
        return self.rows

    def plan(self, *, batch_size: int, epochs: int, seed: int) -> SequentialPlan:
        """In which order its rows are to be trained on: theirs."""
        return SequentialPlan(self.rows, batch_size, epochs, seed)

    def batch(self, rows: Rows) -> Any:
        """Rows to look at: those of the first batch. To train on, rows are had by their position alone."""
        return picked(self.sample, rows % len(leaves(self.sample)[0]))

    def example(self, rows: int) -> Any:
        """So many rows like those that will come, to warm up on."""
        return self.batch(np.arange(rows, dtype=np.int64))

    def fingerprint(self) -> str:
        """What can be told of rows that are not there yet."""
        return f"{self.what}-{self.rows}"

    # -- rows in one process ----------------------------------------------------------------------------------------

    def follow(self, floor: Callable[[], int]) -> None:
        """Begin anew; rows are kept from the position that this tells on: those before it will not be asked for again."""
        self._forget()
        self._floor = floor

    def at(self, plan: Plan, position: int) -> Any:
        """The mini-batch at a position; rows are read as far as that."""
        rows = plan.rows_of(position)
        start, stop = int(rows[0]), int(rows[-1]) + 1
        if self._chunks is None:
            self._chunks = self.chunks(plan)
        lowest = start if self._floor is None else min(start, first_row(plan, self._floor()))
        while self._upto < stop:
            chunk = next(self._chunks)
            self._kept.append((self._upto, chunk))
            self._upto += len(leaves(chunk)[0])
            self._let_go(lowest)
        self._let_go(lowest)
        parts = [
            mapped(chunk, lambda leaf: leaf[max(start - first, 0) : max(stop - first, 0)])  # noqa: B023
            for first, chunk in self._kept
        ]
        columns = zip(*(leaves(part) for part in parts), strict=True)
        return nested(self.sample, iter([torch.cat(column) for column in columns]))

    def _let_go(self, lowest: int) -> None:
        while self._kept and self._kept[0][0] + len(leaves(self._kept[0][1])[0]) <= lowest:
            self._kept.popleft()

    def all(self) -> Arrays:
        """The rows of one epoch, in memory: what is validated on is looked at again and again."""
        plan = self.plan(batch_size=self.rows, epochs=1, seed=0)
        return Arrays(self.at(plan, 0))

    # -- reading ----------------------------------------------------------------------------------------------------

    def chunks(self, plan: Plan) -> Iterator[Any]:
        """All rows of a run, in the batches that they come in.

        The generator draws random numbers of its own: what models draw does not depend on where rows are read.
        """
        luck = _Luck(plan.seed)
        total, seen, steps = plan.rows * plan.epochs, 0, 0
        with luck:
            batches = self._begin()
        while seen < total:
            with luck:
                try:
                    found = next(batches)
                except StopIteration:
                    if not (self.again and seen and seen % self.rows == 0):
                        raise self._ended(seen, steps) from None
                    batches, steps = iter(self._make()), 0
                    continue
            tree = self._checked(found, steps)
            steps += 1
            seen += len(leaves(tree)[0])
            yield tree

    def _begin(self) -> Batches:
        return iter(self._make()) if self.again else chain(self._first, self._make())

    def _look(self) -> Any:
        """The first batch."""
        with _Luck(0):
            batches = iter(self._make())
            for found in batches:
                if not self.again:
                    self._first = iter([found])
                return self._converted(found, f"the first batch of {self.what}")
        raise UsageError(f"{self.what} has given no batch at all: it must yield batches such as (x, y).")

    def _converted(self, found: Any, where: str) -> Any:
        if not self.weighted:
            return batch_of(found, where)
        if not isinstance(found, tuple | list) or len(found) < 2:
            raise UsageError(f"{where} is not (x, y, weight), but weighted=True: yield the weight of each row as the last.")
        *rows, weight = found
        tree = Weighted(batch_of(tuple(rows), where), batch_of(weight, f"the weight of {where}"))
        counts = {len(leaf) for leaf in leaves(tree)}
        if len(counts) > 1 or tree.weight.ndim != 1:
            raise UsageError(f"{where} has weights of shape {tuple(tree.weight.shape)}: give one number for each row.")
        return tree

    def _checked(self, found: Any, step: int) -> Any:
        tree = self._converted(found, f"batch {step} of {self.what}")
        forms = [[(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves(each)] for each in (tree, self.sample)]
        if forms[0] != forms[1]:
            raise UsageError(
                f"Batch {step} of {self.what} has rows of {forms[0]}, but the first had {forms[1]}. What is read as a stream "
                "is cut anew into mini-batches, so its rows have one shape. Rows that are padded batch by batch are given as a "
                "Dataset: pg.Items(dataset, collate=...), or a DataLoader without a sampler of its own."
            )
        return tree

    def _ended(self, seen: int, steps: int) -> UsageError:
        epoch, rows = divmod(seen, self.rows)
        steps -= epoch * self.steps
        if not rows and seen:
            return UsageError(
                f"{self.what} ended after {epoch} epochs, and cannot be begun again: give a function that makes it, or let it "
                "go on for ever."
            )
        return UsageError(
            f"{self.what} ended in epoch {epoch + 1}, after {steps:,} of {self.steps:,} steps ({rows:,} of {self.rows:,} "
            "rows). Let it go on for as many, or say how many rows it has: pg.Generated(..., rows=...)."
        )


class _Luck:
    """Random numbers of one's own: inside ``with``, the global generators are those that were left there the last time."""

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._inside: Any = None
        self._outside: Any = None

    def __enter__(self) -> None:
        self._outside = seeds.states()
        if self._seed is None:
            seeds.restore(self._inside)
            return
        seeds.seed_cpu(self._seed)
        self._seed = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inside = seeds.states()
        seeds.restore(self._outside)


def first_row(plan: Plan, position: int) -> int:
    """The number, over all epochs, of the first row of a position."""
    epoch, batch = divmod(position, plan.batches)
    return epoch * plan.rows + batch * plan.batch_size


def _factory(make: Any) -> tuple[Callable[[], Iterable[Any]], bool]:
    """What begins to yield batches, and whether it can do so again."""
    if isinstance(make, IterableDataset):
        loader: DataLoader[Any] = DataLoader(make, batch_size=COLLATED)
        return (lambda: loader), True
    if hasattr(make, "__next__"):
        return (lambda: make), False
    if hasattr(make, "__iter__"):
        return (lambda: make), True
    if callable(make):
        return make, True
    raise UsageError(
        f"pg.Generated was given a {type(make).__name__}: give a function that returns a generator of batches, a DataLoader, "
        "an IterableDataset, or another iterable of batches."
    )


def _rows_of(make: Any) -> int | None:
    """How many rows an epoch has, where what was given can tell."""
    try:
        if isinstance(make, IterableDataset):
            return len(make)  # type: ignore[arg-type]
        if isinstance(make, DataLoader) and make.batch_size is not None and not isinstance(make.dataset, IterableDataset):
            return len(make) * make.batch_size if make.drop_last else len(make.sampler)  # type: ignore[arg-type]
        if isinstance(make, DataLoader) and make.batch_size is not None:
            return len(make.dataset)  # type: ignore[arg-type]
    except TypeError:
        pass
    return None


def _named(make: Any) -> str:
    name = getattr(make, "__name__", None) or type(make).__name__
    return f"generator {name}" if callable(make) or hasattr(make, "__next__") else name
