"""Plans: the rows of each mini-batch, computed from (seed, epoch), so that every process gets the same at any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from paragrad.errors import UsageError

Rows = npt.NDArray[np.int64]

BUFFER = 262_144
"""Default for the least number of rows that are shuffled together when rows are read in pieces."""
KEPT_BLOCKS = 3
"""Blocks whose order is cached: a mini-batch may span two blocks, and workers may be in different ones."""


@dataclass(frozen=True)
class Plan:
    """The stream of mini-batches of a whole run. Each position is one mini-batch of one epoch.

    Mini-batch k of an epoch has rows k·B to (k+1)·B of a permutation drawn by (seed, epoch).
    """

    rows: int
    batch_size: int
    epochs: int
    seed: int = 0
    _orders: dict[int, Rows] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("batch_size", 1), ("epochs", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer):
                raise UsageError(f"{name}={value!r}, but it must be a whole number.")
            if value < least:
                raise UsageError(f"{name}={value}, but it must be at least {least}.")

    def __reduce__(self) -> tuple[type[Plan], tuple[Any, ...]]:
        # The permutations are not pickled: each process draws them again.
        return type(self), tuple(getattr(self, each.name) for each in fields(self) if each.init)

    @property
    def batches(self) -> int:
        """Mini-batches per epoch, including a short last one."""
        return -(-self.rows // self.batch_size)

    @property
    def positions(self) -> int:
        """Mini-batches in the whole run."""
        return self.batches * self.epochs

    def rows_of(self, position: int) -> Rows:
        """Return the rows of the mini-batch at a position."""
        epoch, batch = divmod(position, self.batches)
        return self.between(epoch, batch * self.batch_size, min((batch + 1) * self.batch_size, self.rows))

    def size_of(self, position: int) -> int:
        """Return the number of rows of the mini-batch at a position."""
        return min(self.batch_size, self.rows - (position % self.batches) * self.batch_size)

    def seed_of(self, position: int) -> int:
        """Return the seed for all random numbers drawn during training on that mini-batch (dropout, augmentation).

        It depends on the mini-batch and not on the worker, so another worker that repeats the mini-batch draws the same.
        """
        return int(np.random.SeedSequence((self.seed, 1, position)).generate_state(1, np.uint64)[0] >> 1)

    def between(self, epoch: int, start: int, stop: int) -> Rows:
        """Return the rows from ``start`` to ``stop`` in the order of an epoch."""
        return self.order(epoch)[start:stop]

    def order(self, epoch: int) -> Rows:
        """Return all rows in the order of an epoch."""
        if epoch not in self._orders:
            while len(self._orders) > 1:
                self._orders.pop(min(self._orders))
            self._orders[epoch] = self._draw(epoch)
        return self._orders[epoch]

    def _draw(self, epoch: int) -> Rows:
        return np.random.default_rng((self.seed, 0, epoch)).permutation(self.rows)


@dataclass(frozen=True)
class SequentialPlan(Plan):
    """Rows in the order in which they come, numbered consecutively over all epochs."""

    def between(self, epoch: int, start: int, stop: int) -> Rows:
        return np.arange(epoch * self.rows + start, epoch * self.rows + stop, dtype=np.int64)

    def _draw(self, epoch: int) -> Rows:
        return self.between(epoch, 0, self.rows)


@dataclass(frozen=True)
class OrderedPlan(Plan):
    """Rows in the order of a DataLoader: shuffled or not, with or without a short last mini-batch."""

    total: int = 0
    """Rows of the data; an epoch has ``rows`` of them."""
    shuffled: bool = True

    @classmethod
    def over(cls, total: int, shuffled: bool, drop_last: bool, *, batch_size: int, epochs: int, seed: int) -> OrderedPlan:
        """Return the plan for ``total`` rows."""
        rows = total - total % batch_size if drop_last else total
        if not rows:
            raise UsageError(f"drop_last leaves out all {total:,} rows: they are fewer than one mini-batch of {batch_size}.")
        return cls(rows, batch_size, epochs, seed, total, shuffled)

    def _draw(self, epoch: int) -> Rows:
        if not self.shuffled:
            return np.arange(self.rows, dtype=np.int64)
        return np.random.default_rng((self.seed, 0, epoch)).permutation(self.total)[: self.rows]


@dataclass(frozen=True)
class _Epoch:
    """The pieces of one epoch in the order of reading, divided into blocks."""

    pieces: Rows
    cuts: Rows
    """The first piece of each block, and the number of pieces."""
    starts: Rows
    """The first row of each block in the stream of the epoch, and the number of rows."""


@dataclass(frozen=True)
class BlockPlan(Plan):
    """Rows that are read in pieces, without an array as long as the data.

    The pieces are permuted by (seed, epoch) and grouped into blocks of about ``buffer`` rows. The rows of a block are
    permuted by (seed, epoch, block). Mini-batches are cut from that stream, so every row comes once per epoch.
    """

    lengths: tuple[int, ...] = ()
    """Rows of each piece; rows are numbered from the first piece on."""
    buffer: int = BUFFER
    _epochs: dict[int, _Epoch] = field(default_factory=dict, init=False, repr=False, compare=False)
    _blocks: dict[tuple[int, int], Rows] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer < 1:
            raise UsageError(f"buffer={self.buffer}, but it must be at least 1 row.")
        assert sum(self.lengths) == self.rows, "the lengths of the pieces do not add up to the number of rows"

    @classmethod
    def over(cls, lengths: Sequence[int], *, batch_size: int, epochs: int, seed: int = 0, buffer: int = BUFFER) -> BlockPlan:
        """Return the plan for pieces of these lengths."""
        own = tuple(int(length) for length in lengths)
        return cls(sum(own), batch_size, epochs, seed, own, buffer)

    @property
    def longest_block(self) -> int:
        """Upper bound of the rows of a block."""
        return min(self.rows, -(-self.rows // self._count) + max(self.lengths))

    @property
    def _count(self) -> int:
        """Number of blocks per epoch that the plan aims at, so that each has at least ``buffer`` rows."""
        return max(1, self.rows // self.buffer)

    def between(self, epoch: int, start: int, stop: int) -> Rows:
        starts = self._epoch(epoch).starts
        parts = []
        block = int(np.searchsorted(starts, start, side="right")) - 1
        while start < stop:
            first, end = int(starts[block]), min(stop, int(starts[block + 1]))
            parts.append(self._block(epoch, block)[start - first : end - first])
            start, block = end, block + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def pieces_of(self, position: int) -> tuple[int, int]:
        """Return the range of places, in the order of reading over all epochs, that the blocks of a mini-batch consist of."""
        epoch, batch = divmod(min(position, self.positions - 1), self.batches)
        table, before = self._epoch(epoch), epoch * len(self.lengths)
        start = batch * self.batch_size
        stop = min(start + self.batch_size, self.rows)
        first, last = np.searchsorted(table.starts, (start, stop - 1), side="right")
        return before + int(table.cuts[first - 1]), before + int(table.cuts[last])

    def piece_at(self, place: int) -> int:
        """Return the piece that is read at a place in the order of reading."""
        epoch, inside = divmod(place, len(self.lengths))
        return int(self._epoch(epoch).pieces[inside])

    @property
    def places(self) -> int:
        """Number of pieces that are read in the whole run."""
        return len(self.lengths) * self.epochs

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            while len(self._epochs) > 1:
                self._epochs.pop(min(self._epochs))
            pieces = np.random.default_rng((self.seed, 5, epoch)).permutation(len(self.lengths))
            ends = np.cumsum(np.asarray(self.lengths, dtype=np.int64)[pieces])
            wanted = np.linspace(0, self.rows, self._count + 1).round().astype(np.int64)
            cuts = np.unique(np.searchsorted(ends, wanted[1:], side="left") + 1)
            # Empty pieces at the end belong to the last block.
            cuts[-1] = len(pieces)
            self._epochs[epoch] = _Epoch(pieces, np.append(0, cuts), np.append(0, ends[cuts - 1]))
        return self._epochs[epoch]

    def _block(self, epoch: int, block: int) -> Rows:
        key = (epoch, block)
        if key not in self._blocks:
            while len(self._blocks) >= KEPT_BLOCKS:
                self._blocks.pop(next(iter(self._blocks)))
            table = self._epoch(epoch)
            pieces = table.pieces[table.cuts[block] : table.cuts[block + 1]]
            lengths = np.asarray(self.lengths, dtype=np.int64)
            starts = (np.cumsum(lengths) - lengths)[pieces]
            inside = lengths[pieces]
            rows = np.repeat(starts - (np.cumsum(inside) - inside), inside) + np.arange(int(inside.sum()), dtype=np.int64)
            self._blocks[key] = np.random.default_rng((self.seed, 4, epoch, block)).permutation(rows)
        return self._blocks[key]

    def _draw(self, epoch: int) -> Rows:
        return self.between(epoch, 0, self.rows)
