"""Statistics of a column that comes in pieces, in bounded memory: moments, extremes and quantiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from paragrad.data.transforms.transform import Column

DIGIT = 16
"""Bits of a float64 that one pass finds in the search for a quantile."""
COLLECTED = 2**17
"""Number of values near a quantile that are kept and sorted, which ends the search; about a megabyte."""
WIDEST = 256
"""Largest number of values in a row whose quantiles are searched at the same time: each takes half a megabyte."""


class Moments:
    """Count, mean and standard deviation of each number in a row (Chan, Golub, LeVeque 1983)."""

    def __init__(self) -> None:
        self.count: Any = 0
        self._first: Any = None
        self._mean: Any = 0.0
        self._squares: Any = 0.0

    def add(self, values: Column, present: Column | None = None) -> None:
        """Add the next rows, float64. ``present`` is False for values to ignore."""
        if not len(values):
            return
        here = np.ones(values.shape, dtype=bool) if present is None else present
        count = here.sum(0)
        if self._first is None:
            self._first = np.zeros(values.shape[1:])
            self.count = np.zeros(values.shape[1:], dtype=np.int64)
        # Sums are of deviations from the first value, so that a mean much larger than the spread costs no digits.
        new = (self.count == 0) & (count > 0)
        first = np.take_along_axis(values, np.argmax(here, 0)[None], 0)[0]
        self._first = np.where(new, first, self._first)
        with np.errstate(over="ignore", invalid="ignore"):
            apart = np.where(here, values - self._first, 0.0)
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
        """Mean of each number in a row."""
        return np.asarray(self._first + self._mean)

    @property
    def deviation(self) -> Column:
        """Standard deviation of each number in a row (divided by n)."""
        return np.asarray(np.sqrt(self._squares / np.maximum(self.count, 1)))


class Extremes:
    """Least and greatest value of each number in a row."""

    def __init__(self) -> None:
        self.least: Any = np.inf
        self.greatest: Any = -np.inf

    def add(self, values: Column) -> None:
        """Add the next rows."""
        if len(values):
            self.least = np.minimum(self.least, values.min(0))
            self.greatest = np.maximum(self.greatest, values.max(0))


class Quantiles:
    """Exact quantiles of one number in bounded memory: each pass over the rows finds a further digit of 16 bits.

    Two passes are usually enough: as soon as few values share the known digits, these values are kept and sorted.
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
        """Add the next rows, float64."""
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
        """Find the next digits after a pass over the rows, and return whether another pass is needed."""
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
        """Return the quantiles, interpolated like NumPy's."""
        made = []
        for share in self._shares:
            place = share * (self.count - 1)
            low, high = self._found[int(np.floor(place))], self._found[int(np.ceil(place))]
            made.append(low + (high - low) * (place - np.floor(place)))
        return made


def _sortable(values: Column) -> Column:
    """Return integers in the order of the floats: the bits of a float64, inverted if it is negative."""
    bits = (values + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    negative = bits >> np.uint64(63) == 1
    return np.where(negative, ~bits, bits | np.uint64(2**63))


def _number(key: int) -> float:
    bits = key & (2**63 - 1) if key >> 63 else ~key & (2**64 - 1)
    return float(np.array(bits, dtype=np.uint64).view(np.float64))
