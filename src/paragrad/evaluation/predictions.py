"""Predictions in a file (.csv, .npy, .parquet): written piece by piece; a failed write leaves no file."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from paragrad.data.formats import arrow
from paragrad.errors import UsageError

Array: TypeAlias = np.ndarray[Any, Any]
Columns: TypeAlias = Mapping[str, Array]
GATHERED = 65_536
"""Rows per write."""


def check(out: Path, *, force: bool) -> None:
    """Raise if predictions cannot be written to this file; read and write nothing."""
    if out.suffix.lower() not in WRITERS:
        raise UsageError(
            f"--out {out} ends in {out.suffix or 'nothing'!r}, but predictions are written as {', '.join(WRITERS)}."
        )
    if out.is_dir():
        raise UsageError(f"--out {out} is a directory: give the name of a file.")
    if out.exists() and not force:
        raise UsageError(f"{out} already exists. Give another --out, or --force to replace it.")
    if not out.parent.is_dir():
        raise UsageError(f"There is no directory {str(out.parent)!r} for {out.name}: create it first.")


def write(out: Path, pieces: Iterable[Columns], rows: int) -> int:
    """Write pieces of ``rows`` rows in total; return the number of rows written. The file gets its name when complete."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    written = 0

    def counted() -> Iterator[Columns]:
        nonlocal written
        for columns in _gathered(pieces):
            yield columns
            written += _length(columns)

    try:
        WRITERS[out.suffix.lower()](temporary, counted(), rows)
        temporary.replace(out)
    except OSError as error:
        raise UsageError(
            f"{out} cannot be written ({error.strerror or error}): free disk space, or give another --out."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return written


def _length(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def _write_csv(path: Path, pieces: Iterable[Columns], rows: int) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for number, columns in enumerate(pieces):
            if number == 0:
                writer.writerow(columns)
            # NumPy writes the shortest text that reads back as the same number.
            writer.writerows(zip(*(values.astype(str).tolist() for values in columns.values()), strict=True))


def _write_npy(path: Path, pieces: Iterable[Columns], rows: int) -> None:
    array: Any = None
    start = 0
    for columns in pieces:
        if array is None:
            fields = [(name, values.dtype) for name, values in columns.items()]
            array = np.lib.format.open_memmap(path, mode="w+", dtype=fields, shape=(rows,))
        end = start + _length(columns)
        for name, values in columns.items():
            array[name][start:end] = values
        start = end
    if array is not None:
        array.flush()


def _write_parquet(path: Path, pieces: Iterable[Columns], rows: int) -> None:
    library, writer = arrow.library(), None
    with contextlib.ExitStack() as stack:
        for columns in pieces:
            table = library.table({name: library.array(values) for name, values in columns.items()})
            if writer is None:
                writer = stack.enter_context(library.parquet.ParquetWriter(path, table.schema))
            writer.write_table(table)


WRITERS: Mapping[str, Callable[[Path, Iterable[Columns], int], None]] = {
    ".parquet": _write_parquet,
    ".csv": _write_csv,
    ".npy": _write_npy,
}
"""Writers by file suffix; the number is that of all rows."""


def _gathered(pieces: Iterable[Columns]) -> Iterator[Columns]:
    waiting: list[Columns] = []
    count = 0
    for columns in pieces:
        waiting.append(columns)
        count += _length(columns)
        if count >= GATHERED:
            yield _joined(waiting)
            waiting, count = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(pieces: list[Columns]) -> Columns:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
