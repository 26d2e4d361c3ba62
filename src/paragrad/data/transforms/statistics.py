"""What is learned of a column in bounded memory, whatever the pieces that it comes in: moments, extremes, quantiles, values."""

from __future__ import annotations

from typing import Any

import numpy as np

from paragrad.data.transforms.transform import Column
from paragrad.errors import UsageError

DIGIT = 16
"""Bits of a float64 that one pass looks at in the search for a quantile."""
COLLECTED = 2**17
"""Values near a quantile that are kept, so that the search ends there; about a megabyte."""
WIDEST = 256
"""Numbers in a row of one column whose quantiles are searched at the same time: each takes half a megabyte."""


class Moments:
    """Count, mean and sum of squared deviations of each number in a row (Chan, Golub, LeVeque 1983)."""

    def __init__(self) -> None:
        self.count: Any = 0
        self._first: Any = None
        self._mean: Any = 0.0
        self._squares: Any = 0.0

    def add(self, values: Column, present: Column | None = None) -> None:
        """The next rows, float64; of ``present`` only those that are."""
        if not len(values):
            return
        here = np.ones(values.shape, dtype=bool) if present is None else present
        count = here.sum(0)
        if self._first is None:
            self._first = np.zeros(values.shape[1:])
            self._seen = np.zeros(values.shape[1:], dtype=bool)
            self.count = np.zeros(values.shape[1:], dtype=np.int64)
        # Deviations from the first value there is: a mean that is large beside the spread then costs no digits.
        new = ~self._seen & (count > 0)
        first = np.take_along_axis(values, np.argmax(here, 0)[None], 0)[0]
        self._first = np.where(new, first, self._first)
        self._seen = self._seen | new
        with np.errstate(over="ignore", invalid="ignore"):
            self._merge(np.where(here, values - self._first, 0.0), here, count)

    def _merge(self, apart: Column, here: Column, count: Column) -> None:
        mean = apart.sum(0) / np.maximum(count, 1)
        off = np.where(here, apart - mean, 0.0)
        squares = (off * off).sum(0) - off.sum(0) ** 2 / np.maximum(count, 1)
        total = self.count + count
        step = mean - self._mean
        share = count / np.maximum(total, 1)
        self._squares = self._squares + squares + step * step * self.count * share
        self._mean = self._mean + step * share
        self.count = total

    @property
    def mean(self) -> Column:
        """The mean of each number in a row."""
        return np.asarray(self._first + self._mean)

    @property
    def deviation(self) -> Column:
        """The standard deviation (divided by n)."""
        return np.asarray(np.sqrt(self._squares / np.maximum(self.count, 1)))


class Extremes:
    """The least and the greatest of each number in a row."""

    def __init__(self) -> None:
        self.least: Any = np.inf
        self.greatest: Any = -np.inf

    def add(self, values: Column) -> None:
        """The next rows."""
        if len(values):
            self.least = np.minimum(self.least, values.min(0))
            self.greatest = np.maximum(self.greatest, values.max(0))


class Quantiles:
    """Exact quantiles of one number in bounded memory: its bits are found from the top, a digit with each pass over the rows.

    Two passes, as a rule: once few enough values share the digits that are known, these are kept and sorted.
    """

    def __init__(self, shares: tuple[float, ...]) -> None:
        self._shares = shares
        self._known = 0
        self._counts: dict[int, Any] = {0: np.zeros(2**DIGIT, dtype=np.int64)}
        self._kept: dict[int, list[Column]] = {}
        self._wanted: dict[int, tuple[int, int]] | None = None
        self._found: dict[int, float] = {}
        self.count = 0

    def add(self, values: Column) -> None:
        """The next rows, float64."""
        keys = _sortable(values.reshape(-1))
        if self._wanted is None:
            self.count += len(keys)
        shift = np.uint64(64 - DIGIT - self._known)
        top = keys >> np.uint64(64 - self._known) if self._known else np.zeros(len(keys), dtype=np.uint64)
        for prefix, counts in self._counts.items():
            mine = keys[top == prefix]
            counts += np.bincount(((mine >> shift) & np.uint64(2**DIGIT - 1)).astype(np.int64), minlength=2**DIGIT)
        for prefix, kept in self._kept.items():
            kept.append(keys[top == prefix])

    def again(self) -> bool:
        """Find the digits that the last pass tells of; whether some are still unknown."""
        if self._wanted is None:
            places = (share * (self.count - 1) for share in self._shares)
            ranks = {int(rank) for place in places for rank in (np.floor(place), np.ceil(place))} if self.count else set()
            self._wanted = {rank: (0, rank) for rank in ranks}
        for rank, (prefix, within) in list(self._wanted.items()):
            if prefix in self._kept:
                self._found[rank] = _number(int(np.sort(np.concatenate(self._kept[prefix]))[within]))
                del self._wanted[rank]
        self._kept = {}
        self._known += DIGIT
        following: dict[int, Any] = {}
        for rank, (prefix, within) in list(self._wanted.items()):
            sums = np.cumsum(self._counts[prefix])
            digit = int(np.searchsorted(sums, within, side="right"))
            longer, before = (prefix << DIGIT) | digit, int(sums[digit - 1]) if digit else 0
            if self._known == 64:
                self._found[rank] = _number(longer)
                del self._wanted[rank]
                continue
            self._wanted[rank] = (longer, within - before)
            if self._counts[prefix][digit] <= COLLECTED:
                self._kept[longer] = []
            else:
                following[longer] = np.zeros(2**DIGIT, dtype=np.int64)
        self._counts = following
        return bool(self._wanted)

    def values(self) -> list[float]:
        """The quantiles, interpolated as NumPy does."""
        made = []
        for share in self._shares:
            place = share * (self.count - 1)
            low, high = self._found[int(np.floor(place))], self._found[int(np.ceil(place))]
            made.append(low + (high - low) * (place - np.floor(place)))
        return made


class Values:
    """The distinct values of a column, of which there may be only so many."""

    def __init__(self, name: str, user: str, most: int) -> None:
        self._about = (name, user, most)
        self.seen: set[Any] = set()

    def add(self, values: Column) -> None:
        """The next rows."""
        self.seen.update(np.unique(values).tolist())
        name, user, most = self._about
        if len(self.seen) > most:
            raise UsageError(
                f"Column {name!r} has more than {most:,} different values, which {user} takes for kinds. Name the columns "
                f"that it is meant for ({user}:columns=...), or allow more ({user}:most=...)."
            )


def _sortable(values: Column) -> Column:
    """Whole numbers in the order of the numbers: the bits of a float64, turned where it is negative."""
    bits = (values + 0.0).view(np.uint64)  # -0.0 is 0.0
    negative = bits >> np.uint64(63) == 1
    return np.where(negative, ~bits, bits | np.uint64(2**63))


def _number(key: int) -> float:
    bits = key & (2**63 - 1) if key >> 63 else ~key & (2**64 - 1)
    return float(np.array(bits, dtype=np.uint64).view(np.float64))
