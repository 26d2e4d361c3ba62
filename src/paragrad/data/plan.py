"""Which rows are in which mini-batch: batch k of an epoch is rows k·B to (k+1)·B of one permutation by (seed, epoch)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paragrad.errors import UsageError

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """The stream of mini-batches of a whole run; a position in it is an epoch and a batch of that epoch."""

    rows: int
    batch_size: int
    epochs: int
    seed: int = 0
    _orders: dict[int, Rows] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("rows", "batch_size", "epochs", "seed"):
            if not isinstance(getattr(self, name), int | np.integer):
                raise UsageError(f"{name}={getattr(self, name)!r}, but it must be a whole number.")
        for name in ("rows", "batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}, but it must be at least 1.")
        if self.seed < 0:
            raise UsageError(f"seed={self.seed}, but a seed is 0 or more.")

    def __reduce__(self) -> tuple[type[Plan], tuple[int, int, int, int]]:
        # The permutations stay behind: they are drawn again where they are needed.
        return type(self), (self.rows, self.batch_size, self.epochs, self.seed)

    @property
    def batches(self) -> int:
        """Mini-batches in one epoch, the last short one included."""
        return -(-self.rows // self.batch_size)

    @property
    def positions(self) -> int:
        """Mini-batches in the whole run."""
        return self.batches * self.epochs

    def rows_of(self, position: int) -> Rows:
        """The rows of the mini-batch at a position."""
        epoch, batch = divmod(position, self.batches)
        return self.order(epoch)[batch * self.batch_size : (batch + 1) * self.batch_size]

    def size_of(self, position: int) -> int:
        """How many rows the mini-batch at a position has."""
        return min(self.batch_size, self.rows - (position % self.batches) * self.batch_size)

    def seed_of(self, position: int) -> int:
        """The seed of every random number drawn while that mini-batch is trained on (dropout, augmentation).

        It belongs to the batch and not to the worker, so that a batch done again by another worker draws the same.
        """
        return int(np.random.SeedSequence((self.seed, 1, position)).generate_state(1, np.uint64)[0] >> 1)

    def order(self, epoch: int) -> Rows:
        """All rows in the order of an epoch."""
        if epoch not in self._orders:
            while len(self._orders) > 1:
                self._orders.pop(min(self._orders))
            self._orders[epoch] = np.random.default_rng((self.seed, 0, epoch)).permutation(self.rows)
        return self._orders[epoch]
