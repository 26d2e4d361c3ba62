"""What every format gives: the columns of a table, and its rows in pieces; and what the formats share."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from paragrad.errors import UsageError

Array: TypeAlias = npt.NDArray[Any]

ROWS = 65_536
"""Rows of a piece where the format does not say."""
BYTES = 64 * 2**20
"""What a piece may take where the format does not say: rows of images are cut into smaller pieces."""
PASSING = {
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.EREMOTEIO, errno.ENOTCONN),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
}
"""What a file system says that is not there for the moment: the file may be sound."""
TEXT = np.dtype(object)
"""The type of a column of text."""


@dataclass(frozen=True)
class Column:
    """The type of a column, and the shape of one row's value."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    jagged: bool = False
    """Whether a row holds a list whose length differs from row to row."""
    whole: bool = field(default=False, compare=False)
    """Of text, which has no types: whether the first numbers are written without a decimal point."""

    def __str__(self) -> str:
        kind = "text" if self.dtype == TEXT else self.dtype.newbyteorder("=").name
        if self.jagged:
            return f"{kind}, lists of different lengths"
        return kind + f" x {' x '.join(map(str, self.shape))}" * bool(self.shape)

    @property
    def row_bytes(self) -> int:
        """What the value of one row takes."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Jagged:
    """A column whose rows hold lists: their values one after another, and how many there are in each row."""

    values: Array
    counts: npt.NDArray[np.int64]

    def padded(self, length: int) -> Array:
        """Every list cut at, or filled up with zeros to, the same length."""
        out = np.zeros((len(self.counts), length), self.values.dtype)
        rows = np.repeat(np.arange(len(self.counts)), self.counts)
        places = np.arange(len(self.values)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        kept = places < length
        out[rows[kept], places[kept]] = self.values[kept]
        return out

    def where(self, mask: Array) -> Jagged:
        """Some of the rows."""
        return Jagged(self.values[np.repeat(mask, self.counts)], self.counts[mask])

    @staticmethod
    def of(lists: Iterable[Any]) -> Jagged:
        """From a sequence of arrays."""
        arrays = [np.asarray(one) for one in lists]
        counts = np.array([len(one) for one in arrays], dtype=np.int64)
        return Jagged(np.concatenate(arrays) if arrays else np.empty(0), counts)


class File(Protocol):
    """A table, picklable: it holds a path, and is opened when it is first read, in each process."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def columns(self) -> Mapping[str, Column]:
        """Every column by name, in the order of the file."""

    @property
    def aside(self) -> Mapping[str, str]:
        """What else is in the file, and why it is no column."""

    @property
    def index(self) -> Sequence[str]:
        """Columns that only name or number the rows, by what the file says of itself: pandas writes such an index."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each piece."""

    def read(self, piece: int, names: Sequence[str]) -> dict[str, Array | Jagged]:
        """Some columns of a piece."""

    def close(self) -> None:
        """Let go of the file; it is opened again when it is read."""


class Handle:
    """Something opened when first asked for, once in each process; it travels closed."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._open: tuple[int, Any] | None = None

    def get(self) -> Any:
        """The thing, open in this process."""
        if self._open is None or self._open[0] != os.getpid():
            self._open = os.getpid(), self._make()
        return self._open[1]

    def close(self) -> None:
        """Close it, where this process has opened it."""
        if self._open is not None and self._open[0] == os.getpid() and hasattr(self._open[1], "close"):
            self._open[1].close()
        self._open = None

    def __reduce__(self) -> tuple[type[Handle], tuple[Callable[[], Any]]]:
        return type(self), (self._make,)


def rows_of_a_piece(columns: Iterable[Column]) -> int:
    """How many rows are read at once where the format does not say."""
    return int(min(ROWS, max(1, BYTES // max(1, sum(column.row_bytes for column in columns)))))


def even(total: int, size: int) -> tuple[int, ...]:
    """A number of rows in pieces of one size; the last may be shorter."""
    return (*([size] * (total // size)), *([total % size] * bool(total % size)))


def gathered(lengths: Iterable[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Which of the format's own small pieces are read together, so that about ``size`` rows come at once."""
    groups: list[tuple[int, ...]] = []
    group: list[int] = []
    count = 0
    for place, length in enumerate(lengths):
        if not length:
            continue
        if group and count + length > size:
            groups.append(tuple(group))
            group, count = [], 0
        group.append(place)
        count += length
    return (*groups, *([tuple(group)] if group else []))


def fits_float32(values: Array) -> bool:
    """Return whether float32 holds all digits of float64 values: the shortest text of both is then the same."""
    known = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        narrow = known.astype(np.float32)
    return np.array_equal(narrow.astype(str).astype(np.float64), known)


def first_text(values: Array) -> int:
    """The first place of a column of text that is no number."""
    for place, value in enumerate(values):
        try:
            float(value)
        except (TypeError, ValueError):
            return place
    return 0


def refuse(name: str, kind: str, error: Exception) -> NoReturn:
    """Say that a file cannot be read; what may pass by itself is left as it is."""
    said = str(error).strip().partition("\n")[0]
    if isinstance(error, OSError):
        number = error.errno or next((int(found) for found in re.findall(r"errno\W+(\d+)", said)), None)
        if number in PASSING:
            raise error
    raise UsageError(
        f"{name} cannot be read as {kind} ({said}). It may be cut short, or of another kind: write it anew."
    ) from error
