"""HDF5: a pandas frame, or datasets of one length. Every dataset is a column, and so is every field of a compound type."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paragrad.config.extras import command
from paragrad.data.formats.file import TEXT, Array, Column, File, Jagged, even, refuse, rows_of_a_piece, usual_length
from paragrad.data.formats.pytables import Place, Stored, frame_in
from paragrad.errors import UsageError, unknown


class Hdf5(File):
    """An HDF5 file, or one group of it. The datasets with the most frequent number of rows form the table."""

    def __init__(self, path: Path, group: str | None) -> None:
        super().__init__(str(path))
        self._group = group
        self._places: dict[str, Place] = {}
        frame = frame_in(self._root(), self.name)
        if frame is None:
            self._add_datasets()
        else:
            self._add_frame(frame)

    def _add_frame(self, frame: Stored) -> None:
        root, chunks, rows = self._root(), 1, 0
        self.aside, self.index = frame.aside, frame.index
        for name, place in frame.columns.items():
            dataset = root[place.dataset]
            kind = dataset.dtype if place.field is None else dataset.dtype[place.field]
            shape = dataset.shape[1:] if place.field is None else ()
            if place.position is not None:
                kind, shape = kind.base, ()
            column = _column(kind, shape)
            if column is None:
                self.aside[name] = f"it is of type {kind}"
                continue
            self.columns[name], self._places[name] = column, place
            chunks, rows = max(chunks, dataset.chunks[0] if dataset.chunks else 1), len(dataset)
        self._cut(rows, chunks)

    def _add_datasets(self) -> None:
        found = self._datasets()
        rows = usual_length(len(dataset) for dataset in found.values() for _ in dataset.dtype.names or (None,))
        compound = [place for place, dataset in found.items() if dataset.dtype.names and len(dataset) == rows]
        chunks = []
        for place, dataset in found.items():
            if len(dataset) != rows:
                self.aside[place] = f"it has {len(dataset):,} rows, but the table has {rows:,}"
                continue
            chunks.append(dataset.chunks[0] if dataset.chunks else 1)
            for field in dataset.dtype.names or (None,):
                name = place if field is None else field if len(compound) == 1 and field not in found else f"{place}/{field}"
                column = _column(dataset.dtype if field is None else dataset.dtype[field], dataset.shape[1:])
                if column is None:
                    self.aside[name] = f"it is of type {dataset.dtype}"
                else:
                    self.columns[name], self._places[name] = column, Place(place, field)
        self._cut(rows, max(chunks, default=1))

    def _cut(self, rows: int, chunk: int) -> None:
        size = rows_of_a_piece(self.columns.values())
        self._size = chunk * max(1, size // chunk)
        self.lengths = even(rows, self._size)

    def read(self, piece: int, names: Sequence[str]) -> dict[str, Array | Jagged]:
        start = piece * self._size
        root = self._root()
        whole: dict[str, Array] = {}
        found: dict[str, Array | Jagged] = {}
        try:
            for name in names:
                place = self._places[name]
                if place.dataset not in whole:
                    whole[place.dataset] = root[place.dataset][start : start + self._size]
                values = whole[place.dataset] if place.field is None else whole[place.dataset][place.field]
                values = values if place.position is None else values[:, place.position]
                found[name] = _array(values, self.columns[name])
        except (OSError, RuntimeError) as error:
            refuse(self.name, "HDF5", error)
        return found

    def _open(self) -> Any:
        try:
            import h5py
        except ImportError:
            raise UsageError(f"h5py, which reads {self.name}, is not installed: {command('hdf5')}") from None
        try:
            return h5py.File(self.name, "r", locking=False)
        except OSError as error:
            refuse(self.name, "HDF5", error)

    def _root(self) -> Any:
        file = self._file()
        if self._group is None:
            return file
        if self._group not in file or not hasattr(file[self._group], "keys"):
            raise unknown(f"group in {self.name}:", self._group, [key for key, value in file.items() if hasattr(value, "keys")])
        return file[self._group]

    def _datasets(self) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def keep(name: str, thing: Any) -> None:
            if hasattr(thing, "shape"):
                if thing.shape:
                    found[name] = thing
                else:
                    self.aside[name] = "it is a single value"

        root = self._root()
        if hasattr(root, "shape"):
            return {root.name.rpartition("/")[2]: root} if root.shape else {}
        root.visititems(keep)
        return found


def _column(dtype: Any, shape: tuple[int, ...]) -> Column | None:
    if dtype.subdtype is not None:
        dtype, inner = dtype.subdtype
        shape = (*shape, *inner)
    listed = dtype.metadata.get("vlen") if dtype.metadata else None
    if dtype.kind == "S" or listed in (str, bytes):
        return None if shape else Column(TEXT)
    if listed is not None:
        return None if shape or np.dtype(listed).kind not in "biuf" else Column(np.dtype(listed).newbyteorder("="), jagged=True)
    return Column(dtype.newbyteorder("="), shape) if dtype.kind in "biuf" else None


def _array(values: Array, column: Column) -> Array | Jagged:
    if column.jagged:
        found = Jagged.of(values)
        return Jagged(found.values.astype(column.dtype), found.counts)
    if column.dtype == TEXT:
        return np.array([value.decode() if isinstance(value, bytes) else value for value in values], dtype=object)
    return np.asarray(values, dtype=column.dtype)
