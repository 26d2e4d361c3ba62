"""Parquet: a piece is one row group, or several small ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paragrad.data.formats import arrow
from paragrad.data.formats.file import Array, File, Jagged, gathered, refuse, rows_of_a_piece
from paragrad.errors import UsageError


class Parquet(File):
    """A Parquet file. ``tree`` is not used."""

    def __init__(self, path: Path, tree: str | None = None) -> None:
        super().__init__(str(path))
        file = self._file()
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
        try:
            found = self._file().read_row_groups(list(self._groups[piece]), columns=list(names), use_threads=False)
        except (OSError, ValueError) as error:
            refuse(self.name, "Parquet", error)
        for name in names:
            if self.columns[name].shape and found.column(name).null_count:
                row = sum(self.lengths[:piece]) + found.column(name).is_null().to_pylist().index(True)
                raise UsageError(f"Column {name!r} of {self.name} has no value in row {row}: leave such rows out.")
        return {name: arrow.array_of(found.column(name), self.columns[name]) for name in names}

    def _open(self) -> Any:
        library = arrow.library()
        try:
            return library.parquet.ParquetFile(self.name)
        except (OSError, ValueError) as error:
            refuse(self.name, "Parquet", error)
