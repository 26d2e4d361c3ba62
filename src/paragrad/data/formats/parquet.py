"""Parquet: a piece is one row group, or several small ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paragrad.data.formats import arrow
from paragrad.data.formats.file import Array, Column, Handle, Jagged, gathered, refuse, rows_of_a_piece
from paragrad.errors import UsageError


def open_file(path: Path, tree: str | None) -> Parquet:
    """The table in a Parquet file."""
    return Parquet(path)


class Parquet:
    """A Parquet file."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._handle = Handle(partial(_open, self.name))
        file = self._handle.get()
        self.columns: dict[str, Column] = {}
        self.aside: dict[str, str] = {}
        self.index = arrow.index_of(file.schema_arrow.metadata)
        for field in file.schema_arrow:
            column = arrow.column_of(field.type)
            if column is None:
                self.aside[field.name] = f"it is of type {field.type}"
            else:
                self.columns[field.name] = column
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        self._groups = gathered(sizes, rows_of_a_piece(self.columns.values()))
        self.lengths = tuple(sum(sizes[group] for group in groups) for groups in self._groups)

    def read(self, piece: int, names: Sequence[str]) -> dict[str, Array | Jagged]:
        """Some columns of a piece."""
        try:
            found = self._handle.get().read_row_groups(list(self._groups[piece]), columns=list(names), use_threads=False)
        except (OSError, ValueError) as error:
            refuse(self.name, "Parquet", error)
        for name in names:
            if self.columns[name].shape and found.column(name).null_count:
                row = sum(self.lengths[:piece]) + found.column(name).is_null().to_pylist().index(True)
                raise UsageError(f"Column {name!r} of {self.name} has no value in row {row}: leave such rows out.")
        return {name: arrow.array_of(found.column(name), self.columns[name]) for name in names}

    def close(self) -> None:
        """Let go of the file."""
        self._handle.close()


def _open(name: str) -> Any:
    library = arrow.library()
    try:
        return library.parquet.ParquetFile(name)
    except (OSError, ValueError) as error:
        refuse(name, "Parquet", error)
