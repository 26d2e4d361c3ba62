"""The base class of all formats (columns of a table, and its rows in pieces), and functions that formats share."""

from __future__ import annotations

import errno
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from paragrad.errors import UsageError

Array: TypeAlias = npt.NDArray[Any]

ROWS = 65_536
"""Rows of a piece if the format does not define pieces."""
BYTES = 64 * 2**20
"""Largest size of a piece if the format does not define pieces: images are read in pieces of fewer rows."""
PASSING = {
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.EREMOTEIO, errno.ENOTCONN),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
}
"""Error numbers of a file system that is temporarily unavailable: the file may be intact."""
TEXT = np.dtype(object)
"""Type of a column of text."""


@dataclass(frozen=True)
class Column:
    """Type of a column, and shape of its value in one row."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    jagged: bool = False
    """True if a row holds a list whose length differs from row to row."""
    whole: bool = field(default=False, compare=False)
    """True if a text file writes the first numbers without a decimal point. Text files have no types."""

    def __str__(self) -> str:
        kind = "text" if self.dtype == TEXT else self.dtype.newbyteorder("=").name
        if self.jagged:
            return f"{kind}, lists of different lengths"
        return kind + f" x {' x '.join(map(str, self.shape))}" * bool(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of the value of one row."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Jagged:
    """A column of lists: all values, one list after another, and the length of each list."""

    values: Array
    counts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.counts)

    def padded(self, length: int) -> Array:
        """Return all lists cut to, or padded with zeros to, the same length."""
        out = np.zeros((len(self.counts), length), self.values.dtype)
        rows = np.repeat(np.arange(len(self.counts)), self.counts)
        places = np.arange(len(self.values)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        kept = places < length
        out[rows[kept], places[kept]] = self.values[kept]
        return out

    def __getitem__(self, rows: slice | Array) -> Jagged:
        """Return a range of rows from a start to a stop, or the rows for which a mask is true."""
        if not isinstance(rows, slice):
            return Jagged(self.values[np.repeat(rows, self.counts)], self.counts[rows])
        edges = np.append(0, np.cumsum(self.counts))
        return Jagged(self.values[edges[rows.start] : edges[min(rows.stop, len(self))]], self.counts[rows])

    @staticmethod
    def of(lists: Iterable[Any]) -> Jagged:
        """Return a sequence of arrays as a jagged column."""
        arrays = [np.asarray(one) for one in lists]
        counts = np.array([len(one) for one in arrays], dtype=np.int64)
        return Jagged(np.concatenate(arrays) if arrays else np.empty(0), counts)


class File(ABC):
    """A table in a file or in memory. Every process opens the file on first use; pickle leaves the open file out."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Name in messages."""
        self.columns: dict[str, Column] = {}
        """Every column by name, in the order of the file."""
        self.aside: dict[str, str] = {}
        """Other contents of the file by name, with the reason why each is not a column."""
        self.index: tuple[str, ...] = ()
        """Columns that only name or number the rows, according to the file: pandas writes such an index."""
        self.lengths: tuple[int, ...] = ()
        """Rows of each piece."""
        self._opened: tuple[int, Any] | None = None

    @abstractmethod
    def read(self, piece: int, names: Sequence[str]) -> dict[str, Array | Jagged]:
        """Return some columns of a piece."""

    def _open(self) -> Any:
        """Open the file; formats that keep no file open do not need it."""
        raise NotImplementedError

    def _file(self) -> Any:
        """Return the file, opened in this process."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), self._open()
        return self._opened[1]

    def close(self) -> None:
        """Close the file if this process opened it; the next read opens it again."""
        if self._opened is not None and self._opened[0] == os.getpid() and hasattr(self._opened[1], "close"):
            self._opened[1].close()
        self._opened = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def rows_of_a_piece(columns: Iterable[Column]) -> int:
    """Return the number of rows to read at once if the format does not define pieces."""
    return int(min(ROWS, max(1, BYTES // max(1, sum(column.row_bytes for column in columns)))))


def usual_length(lengths: Iterable[int]) -> int:
    """Return the most frequent length; of equally frequent ones, the largest."""
    counts = Counter(lengths)
    return max(counts, key=lambda length: (counts[length], length), default=0)


def even(total: int, size: int) -> tuple[int, ...]:
    """Divide a number of rows into pieces of one size; the last may be shorter."""
    return (*([size] * (total // size)), *([total % size] * bool(total % size)))


def gathered(lengths: Iterable[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Group small pieces of a format so that one read returns about ``size`` rows."""
    groups: list[list[int]] = []
    count = 0
    for place, length in enumerate(lengths):
        if not length:
            continue
        if not groups or count + length > size:
            groups.append([])
            count = 0
        groups[-1].append(place)
        count += length
    return tuple(tuple(group) for group in groups)


def fits_float32(values: Array) -> bool:
    """Return whether float32 holds all digits of float64 values: the shortest text of both is then the same."""
    known = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        narrow = known.astype(np.float32)
    return np.array_equal(narrow.astype(str).astype(np.float64), known)


def is_number(text: Any) -> bool:
    """Return whether a text can be read as a number."""
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return True


def first_text(values: Array) -> int:
    """Return the first row of a column of text that is not a number."""
    return next((row for row, value in enumerate(values) if not is_number(value)), 0)


def is_temporary(error: Exception) -> bool:
    """Return whether the file system is temporarily unavailable. Some libraries give the error number only as text."""
    if not isinstance(error, OSError):
        return False
    found = re.search(r"errno\W+(\d+)", str(error))
    return (error.errno or (int(found[1]) if found else None)) in PASSING


def refuse(name: str, kind: str, error: Exception) -> NoReturn:
    """Raise that a file cannot be read. A temporary error of the file system is raised unchanged."""
    if is_temporary(error):
        raise error
    reason = str(error).strip().partition("\n")[0]
    raise UsageError(
        f"{name} cannot be read as {kind} ({reason}). It may be truncated, or have another format: write it again."
    ) from error
