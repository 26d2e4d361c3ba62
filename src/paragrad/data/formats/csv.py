"""CSV: one pass over the file finds where rows begin. A piece is then a range of bytes that can be parsed alone."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paragrad.data import progress
from paragrad.data.formats import arrow
from paragrad.data.formats.file import ROWS, TEXT, Array, Column, File, Jagged, first_text, is_number
from paragrad.errors import UsageError

BLOCK = 4 * 2**20
"""Bytes that are scanned at once."""
MOST = 4 * BLOCK
"""Bytes after which a piece ends with the block, even if it has few rows."""
DELIMITERS = ",;\t"
NEWLINE, RETURN, QUOTE = b'\n\r"'
NUMBER = np.dtype(np.float64)


class Csv(File):
    """A CSV file. If the first line has numbers only instead of names, the columns are called 0, 1, 2, ...

    A column is float64 if all its values in the first piece are numbers, else text. ``tree`` is not used.
    """

    def __init__(self, path: Path, tree: str | None = None) -> None:
        super().__init__(str(path))
        try:
            self._names, self._delimiter, begin = _head(self.name)
            lines = _Lines(begin)
            with open(self.name, "rb") as stream:
                lines.scan(stream, self.name)
        except OSError as error:
            raise UsageError(f"{self.name} cannot be read ({error.strerror}).") from error
        self._cuts, self.lengths, self._broken = tuple(lines.cuts), tuple(lines.lengths), lines.broken
        self.columns = dict.fromkeys(self._names, Column(NUMBER))
        if self.lengths:
            self.columns = {name: _column(values) for name, values in self._parse(0, self._names, None).items()}

    def read(self, piece: int, names: Sequence[str]) -> dict[str, Array | Jagged]:
        library = arrow.library()
        types = {TEXT: library.string(), np.dtype(bool): library.bool_(), NUMBER: library.float64()}
        found = self._parse(piece, names, {name: types[self.columns[name].dtype] for name in names})
        return {name: arrow.array_of(found[name], self.columns[name]) for name in names}

    def _parse(self, piece: int, names: Sequence[str], types: dict[str, Any] | None) -> dict[str, Any]:
        """Return columns of a piece as these Arrow types; if None, as types inferred from the values."""
        library = arrow.library()
        with open(self.name, "rb") as stream:
            stream.seek(self._cuts[piece])
            text = stream.read(self._cuts[piece + 1] - self._cuts[piece])
        try:
            table = library.csv.read_csv(
                library.BufferReader(text),
                # One block, so that types are inferred from all of it.
                library.csv.ReadOptions(column_names=self._names, use_threads=False, block_size=len(text) + 1),
                library.csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=self._broken),
                library.csv.ConvertOptions(include_columns=list(names), column_types=types),
            )
        except ValueError as error:
            if types is not None:
                self._refuse_text(piece, names)
            reason = str(error).strip().partition("\n")[0]
            raise UsageError(
                f"{self.name} cannot be read as CSV ({reason}). Correct that line, or write the file again."
            ) from error
        if table.num_rows != self.lengths[piece]:
            raise UsageError(f"{self.name} has changed since it was first read, or is not a CSV file. Start again.")
        return {name: table.column(name) for name in names}

    def _refuse_text(self, piece: int, names: Sequence[str]) -> None:
        """Raise if a column of numbers has another value in this piece, and name the first one."""
        library = arrow.library()
        for name in names:
            if self.columns[name].dtype == TEXT or _column(self._parse(piece, [name], None)[name]).dtype != TEXT:
                continue
            values = self._parse(piece, [name], {name: library.string()})[name].to_pylist()
            place = first_text(np.array([value or "nan" for value in values], dtype=object))
            raise UsageError(
                f"Column {name!r} of {self.name} holds numbers, but {values[place]!r} in row "
                f"{sum(self.lengths[:piece]) + place}. Put a number there, or leave it empty if it is missing."
            )


def _column(values: Any) -> Column:
    found = arrow.column_of(values.type)
    if found is None:
        return Column(TEXT)  # a date, for example
    if found.dtype in (TEXT, bool):
        return found
    return Column(NUMBER, whole=arrow.library().types.is_integer(values.type))


def _head(name: str) -> tuple[list[str], str, int]:
    """Return the names of the columns, the delimiter, and the byte at which the rows begin."""
    with open(name, "rb") as stream:
        start, line = 0, stream.readline(BLOCK)
        while line and not line.strip():
            start, line = stream.tell(), stream.readline(BLOCK)
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UsageError(f"{name} cannot be read as CSV: its first line is not text. It may have another format.") from None
        delimiter = max(DELIMITERS, key=text.count)
        names = [value.strip() for value in next(csv.reader([text.rstrip("\r\n")], delimiter=delimiter), [])]
        if names and all(is_number(value) for value in names):
            return [str(place) for place in range(len(names))], delimiter, start
        twice = next((value for place, value in enumerate(names) if value in names[:place]), None)
        if twice is not None:
            raise UsageError(f"{name} has two columns called {twice!r}: give each a different name in the first line.")
        return names, delimiter, stream.tell()


class _Lines:
    """Byte ranges of the pieces. Empty lines are not rows, and a line break in quotes does not end a row."""

    def __init__(self, begin: int) -> None:
        self.cuts = [begin]
        self.lengths: list[int] = []
        self.broken = False
        """True if a value in quotes holds a line break."""
        self._line = begin
        """First byte of the current line."""
        self._last = 0
        self._rows = 0
        self._quoted = False

    def scan(self, stream: Any, name: str) -> None:
        """Scan the file block by block."""
        total = os.fstat(stream.fileno()).st_size
        stream.seek(self._line)
        base = self._line
        while block := stream.read(BLOCK):
            self._block(np.frombuffer(block, np.uint8), base)
            base += len(block)
            self._last = block[-1]
            progress.report(f"scanning {name}", base, total, "bytes")
            if self._rows and self._line - self.cuts[-1] >= MOST:
                self._cut(self._line)
        if base > self._line and not (base == self._line + 1 and self._last == RETURN):
            self._rows += 1
        if self._rows:
            self._cut(base)

    def _block(self, block: Array, base: int) -> None:
        breaks = np.flatnonzero(block == NEWLINE)
        quotes = block == QUOTE
        if self._quoted or quotes.any():
            inside = np.logical_xor.accumulate(quotes) ^ self._quoted
            self.broken |= bool(inside[breaks].any())
            breaks = breaks[~inside[breaks]]
            self._quoted = bool(inside[-1])
        if not len(breaks):
            return
        ends = breaks + base
        starts = np.concatenate([[self._line], ends[:-1] + 1])
        first = np.where(starts < base, self._last, block[np.maximum(starts - base, 0)])
        filled = (ends - starts > 1) | ((ends - starts == 1) & (first != RETURN))
        rows = starts[filled]
        while self._rows + len(rows) > ROWS:
            room = ROWS - self._rows
            self._rows = ROWS
            self._cut(int(rows[room]))
            rows = rows[room:]
        self._rows += len(rows)
        self._line = int(ends[-1]) + 1

    def _cut(self, at: int) -> None:
        self.cuts.append(at)
        self.lengths.append(self._rows)
        self._rows = 0
