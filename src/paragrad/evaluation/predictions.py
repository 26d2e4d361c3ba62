"""Predictions in a file (.csv, .npy, .parquet): written piece by piece, whole or not at all."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from paragrad.data.formats import arrow
from paragrad.errors import UsageError

Array: TypeAlias = np.ndarray[Any, Any]
Columns: TypeAlias = Mapping[str, Array]
GATHERED = 65_536
"""Rows that are written at a time."""


class Writer(Protocol):
    """A file that is open."""

    def write(self, columns: Columns) -> None:
        """The next rows."""

    def close(self) -> None:
        """All rows are written."""


def check(out: Path, *, force: bool) -> None:
    """Raise where predictions cannot go there; nothing is read or written yet."""
    if out.suffix.lower() not in WRITERS:
        raise UsageError(
            f"--out {out} ends in {out.suffix or 'nothing'!r}, but predictions are written as {', '.join(WRITERS)}."
        )
    if out.is_dir():
        raise UsageError(f"--out {out} is a directory: give the name of a file.")
    if out.exists() and not force:
        raise UsageError(f"{out} is already there. Give another --out, or --force to replace it.")
    if not out.parent.is_dir():
        raise UsageError(f"There is no directory {str(out.parent)!r} to write {out.name} in: make it first.")


def write(out: Path, pieces: Iterable[Columns], rows: int) -> int:
    """Write pieces of ``rows`` rows in all; the file has its name only when it is whole. Returns how many were written."""
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with contextlib.closing(_Counted(WRITERS[out.suffix.lower()](aside, rows))) as writer:
            for columns in _gathered(pieces):
                writer.write(columns)
        aside.replace(out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror or error}): make room, or give another --out.") from error
    finally:
        aside.unlink(missing_ok=True)
    return writer.rows


class _Counted:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.rows = 0

    def write(self, columns: Columns) -> None:
        self._writer.write(columns)
        self.rows += len(next(iter(columns.values())))

    def close(self) -> None:
        self._writer.close()


class _Csv:
    def __init__(self, path: Path, rows: int) -> None:
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._begun = False

    def write(self, columns: Columns) -> None:
        if not self._begun:
            self._writer.writerow(columns)
            self._begun = True
        # As text NumPy gives the shortest number that is read back as the same one.
        self._writer.writerows(zip(*(values.astype(str).tolist() for values in columns.values()), strict=True))

    def close(self) -> None:
        self._file.close()


class _Npy:
    def __init__(self, path: Path, rows: int) -> None:
        self._path = path
        self._rows = rows
        self._written = 0
        self._map: Any = None

    def write(self, columns: Columns) -> None:
        if self._map is None:
            fields = [(name, values.dtype) for name, values in columns.items()]
            self._map = np.lib.format.open_memmap(self._path, mode="w+", dtype=fields, shape=(self._rows,))
        count = len(next(iter(columns.values())))
        for name, values in columns.items():
            self._map[name][self._written : self._written + count] = values
        self._written += count

    def close(self) -> None:
        if self._map is not None:
            self._map.flush()


class _Parquet:
    def __init__(self, path: Path, rows: int) -> None:
        self._arrow = arrow.library()
        self._path = path
        self._writer: Any = None

    def write(self, columns: Columns) -> None:
        table = self._arrow.table({name: self._arrow.array(values) for name, values in columns.items()})
        if self._writer is None:
            self._writer = self._arrow.parquet.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


WRITERS: Mapping[str, Callable[[Path, int], Writer]] = {".parquet": _Parquet, ".csv": _Csv, ".npy": _Npy}
"""What writes a file, by how its name ends."""


def _gathered(pieces: Iterable[Columns]) -> Iterator[Columns]:
    """The same rows in larger pieces."""
    waiting: list[Columns] = []
    count = 0
    for columns in pieces:
        waiting.append(columns)
        count += len(next(iter(columns.values())))
        if count >= GATHERED:
            yield _joined(waiting)
            waiting, count = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(pieces: list[Columns]) -> Columns:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
