"""Rows that come once, from a generator, a DataLoader or another iterable: one process reads them and deals them out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from paragrad.data import seeds
from paragrad.data.arena import nested, picked
from paragrad.data.plan import Plan, Rows, SequentialPlan
from paragrad.data.source import Arrays, Weighted, leaves, mapped, row_types
from paragrad.data.trees import batch_of
from paragrad.errors import UsageError

Batches: TypeAlias = Iterator[Any]
COLLATED = 256
"""Rows of an IterableDataset that are read at a time."""


class Generated:
    """A source over an iterable of mini-batches. Its rows are numbered in the order in which they come, and not shuffled.

    make      a function without arguments that returns a generator or another iterable of batches such as (x, y); or a
              DataLoader, an IterableDataset, or another iterable that can be restarted. A generator that has started cannot be
              sent to another process, so only engines with one process accept it
    rows      number of rows per epoch; or ``steps``: number of its batches per epoch, which must then have one size
    weighted  True if the last element of each batch is the weight of its rows, as in (x, y, weight)
    """

    def __init__(self, make: Any, *, rows: int | None = None, steps: int | None = None, weighted: bool = False) -> None:
        if rows is not None and steps is not None:
            raise UsageError(
                f"rows={rows} and steps={steps} are both given, but the length of an epoch needs only one of them."
            )
        for name, value in (("rows", rows), ("steps", steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
                raise UsageError(f"{name}={value!r}, but it must be a whole number of at least 1.")
        self._make, self.again = _factory(make)
        self.what = _named(make)
        self.weighted = weighted
        self._first: Batches = iter(())
        self.sample = self._first_batch()
        length = len(leaves(self.sample)[0])
        found = rows if rows is not None else _rows_of(make) if steps is None else steps * length
        if found is None:
            raise UsageError(
                f"{self.what} does not say how many rows make an epoch: give pg.Generated(..., rows=...), or steps=..., the "
                "number of its batches per epoch."
            )
        self.rows = int(found)
        self.steps = -(-self.rows // length)
        self._reset()

    def _reset(self) -> None:
        """Reset the state that belongs to one process."""
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
        self._reset()

    def __len__(self) -> int:
        return self.rows

    def plan(self, *, batch_size: int, epochs: int, seed: int) -> SequentialPlan:
        """Return the order in which to train on its rows: the order in which they come."""
        return SequentialPlan(self.rows, batch_size, epochs, seed)

    def batch(self, rows: Rows) -> Any:
        """Return example rows from the first batch. Training reads rows by their position instead."""
        return picked(self.sample, rows % len(leaves(self.sample)[0]))

    def example(self, rows: int) -> Any:
        """Return a mini-batch of ``rows`` typical rows, to warm up on."""
        return self.batch(np.arange(rows, dtype=np.int64))

    def fingerprint(self) -> str:
        """Return a short text for the data; the rows themselves are not known yet."""
        return f"{self.what}-{self.rows}"

    def follow(self, floor: Callable[[], int]) -> None:
        """Restart. ``floor()`` returns the lowest position that may still be read; earlier rows are not kept."""
        self._reset()
        self._floor = floor

    def at(self, plan: Plan, position: int) -> Any:
        """Return the mini-batch at a position; rows are read up to there."""
        rows = plan.rows_of(position)
        start, stop = int(rows[0]), int(rows[-1]) + 1
        if self._chunks is None:
            self._chunks = self.chunks(plan)
        lowest = start if self._floor is None else min(start, first_row(plan, self._floor()))
        while self._upto < stop:
            chunk = next(self._chunks)
            self._kept.append((self._upto, chunk))
            self._upto += len(leaves(chunk)[0])
            self._drop_before(lowest)
        self._drop_before(lowest)
        parts = [
            mapped(chunk, lambda leaf: leaf[max(start - first, 0) : max(stop - first, 0)])  # noqa: B023
            for first, chunk in self._kept
        ]
        columns = zip(*(leaves(part) for part in parts), strict=True)
        return nested(self.sample, iter([torch.cat(column) for column in columns]))

    def _drop_before(self, lowest: int) -> None:
        while self._kept and self._kept[0][0] + len(leaves(self._kept[0][1])[0]) <= lowest:
            self._kept.popleft()

    def all(self) -> Arrays:
        """Return the rows of one epoch in memory: validation reads them many times."""
        plan = self.plan(batch_size=self.rows, epochs=1, seed=0)
        return Arrays(self.at(plan, 0))

    def chunks(self, plan: Plan) -> Iterator[Any]:
        """Yield all rows of a run, in the batches of the iterable.

        The iterable has a separate random state, so the random numbers of models do not depend on which process reads.
        """
        random = _RandomState(plan.seed)
        total, done, steps = plan.rows * plan.epochs, 0, 0
        with random.used():
            batches = iter(self._make()) if self.again else chain(self._first, self._make())
        while done < total:
            with random.used():
                try:
                    found = next(batches)
                except StopIteration:
                    if not (self.again and done and done % self.rows == 0):
                        raise self._ended(done, steps) from None
                    batches, steps = iter(self._make()), 0
                    continue
            tree = self._converted(found, f"batch {steps} of {self.what}")
            types, expected = row_types(tree), row_types(self.sample)
            if types != expected:
                raise UsageError(
                    f"Batch {steps} of {self.what} has rows of {types}, but the first batch had {expected}. A stream is cut "
                    "into new mini-batches, so all its rows must have one shape. For rows that are padded batch by batch, give "
                    "a Dataset: pg.Items(dataset, collate=...), or a DataLoader without a custom sampler."
                )
            steps += 1
            done += len(leaves(tree)[0])
            yield tree

    def _first_batch(self) -> Any:
        with _RandomState(0).used():
            for found in self._make():
                if not self.again:
                    self._first = iter([found])
                return self._converted(found, f"the first batch of {self.what}")
        raise UsageError(f"{self.what} has yielded no batch at all: it must yield batches such as (x, y).")

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

    def _ended(self, done: int, steps: int) -> UsageError:
        epoch, rows = divmod(done, self.rows)
        steps -= epoch * self.steps
        if not rows and done:
            return UsageError(
                f"{self.what} ended after {epoch} epochs and cannot be restarted: give a function that makes it, or let it "
                "continue forever."
            )
        return UsageError(
            f"{self.what} ended in epoch {epoch + 1}, after {steps:,} of {self.steps:,} steps ({rows:,} of {self.rows:,} "
            "rows). Let it yield as many, or give the number of its rows: pg.Generated(..., rows=...)."
        )


class _RandomState:
    """A separate state of the global random number generators."""

    def __init__(self, seed: int) -> None:
        with seeds.kept():
            seeds.seed_cpu(seed)
            self._states = seeds.states()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the global generators continue from this state inside ``with``."""
        with seeds.kept():
            seeds.restore(self._states)
            try:
                yield
            finally:
                self._states = seeds.states()


def first_row(plan: Plan, position: int) -> int:
    """Return the number, over all epochs, of the first row of a position."""
    epoch, batch = divmod(position, plan.batches)
    return epoch * plan.rows + batch * plan.batch_size


def _factory(make: Any) -> tuple[Callable[[], Iterable[Any]], bool]:
    """Return a function that starts to yield batches, and whether it can do so again."""
    if isinstance(make, IterableDataset):
        loader: DataLoader[Any] = DataLoader(make, batch_size=COLLATED)
        return (lambda: loader), True
    if hasattr(make, "__iter__"):
        return (lambda: make), not hasattr(make, "__next__")
    if callable(make):
        return make, True
    raise UsageError(
        f"pg.Generated was given a {type(make).__name__}: give a function that returns a generator of batches, a DataLoader, "
        "an IterableDataset, or another iterable of batches."
    )


def _rows_of(make: Any) -> int | None:
    """Return the number of rows per epoch, or None if it is not known."""
    with suppress(TypeError):
        if isinstance(make, IterableDataset):
            return len(make)  # type: ignore[arg-type]
        if isinstance(make, DataLoader) and make.batch_size is not None:
            if isinstance(make.dataset, IterableDataset):
                return len(make.dataset)  # type: ignore[arg-type]
            return len(make) * make.batch_size if make.drop_last else len(make.sampler)  # type: ignore[arg-type]
    return None


def _named(make: Any) -> str:
    name = getattr(make, "__name__", None) or type(make).__name__
    return f"generator {name}" if callable(make) or hasattr(make, "__next__") else name
