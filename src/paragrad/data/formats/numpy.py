"""NumPy's files: .npy, and .npz with one array per column. Uncompressed arrays are memory-mapped instead of read."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from paragrad.data.formats.file import TEXT, Array, Column, File, Jagged, even, refuse, rows_of_a_piece, usual_length
from paragrad.data.source import find_target
from paragrad.errors import UsageError, unknown

PARTS = ("train", "test")


class Numpy(File):
    """Arrays of one length. A matrix in an .npy has the columns 0, 1, 2, ...; a compound type has one per field.

    An .npz with x_train and y_train has the parts train and test, each a table of x and y.
    """

    def __init__(self, path: Path, part: str | None) -> None:
        super().__init__(str(path))
        self._part = part
        arrays: dict[str, Array] = self._file()
        rows = usual_length(len(array) for array in arrays.values() if array.ndim)
        for name, array in arrays.items():
            column = _column(array.dtype, array.shape[1:])
            if not array.ndim:
                self.aside[name] = "it is a single value"
            elif len(array) != rows:
                self.aside[name] = f"it has {len(array):,} rows, but the table has {rows:,}"
            elif column is None:
                self.aside[name] = f"it is of type {array.dtype}"
            else:
                self.columns[name] = column
        self._size = rows_of_a_piece(self.columns.values())
        self.lengths = even(rows, self._size)

    def read(self, piece: int, names: Sequence[str]) -> dict[str, Array | Jagged]:
        start = piece * self._size
        arrays = self._file()
        return {name: np.array(arrays[name][start : start + self._size], dtype=self.columns[name].dtype) for name in names}

    def _open(self) -> dict[str, Array]:
        """Return every column as an array, memory-mapped if possible."""
        try:
            if Path(self.name).suffix.lower() == ".npz":
                parts = parts_of(Path(self.name))
                if self._part is not None and self._part not in parts:
                    raise unknown(f"part of {self.name}:", self._part, parts)
                with zipfile.ZipFile(self.name) as archive:
                    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                    if parts:
                        members = {column: members[f"{column}_{self._part or PARTS[0]}"] for column in "xy"}
                    return {column: _member(self.name, archive, info) for column, info in members.items()}
            array = np.load(self.name, mmap_mode="r", allow_pickle=False)
        except UsageError:
            raise
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            if "Python objects" in str(error) or "Object arrays" in str(error):
                raise UsageError(
                    f"{self.name} holds pickled Python objects, which can run any code when they are read. Save plain "
                    "numbers, with the same length in every row."
                ) from error
            refuse(self.name, "a NumPy file", error)
        if array.dtype.names:
            return {field: array[field] for field in array.dtype.names}
        return columns_of_matrix(array)


def _column(dtype: Any, shape: tuple[int, ...]) -> Column | None:
    if dtype.kind == "U":
        return None if shape else Column(TEXT)
    return Column(dtype.newbyteorder("="), shape) if dtype.kind in "biuf" else None


def parts_of(path: Path) -> tuple[str, ...]:
    """Return the parts of an .npz that are present: train, and test."""
    names = _names(path)
    return tuple(part for part in PARTS if {f"x_{part}", f"y_{part}"} <= names) if "x_train" in names else ()


def has_columns(path: Path) -> bool:
    """Return whether an .npz is a table like other files: it has no parts, and one array has the name of a target."""
    names = _names(path)
    return not any(name.startswith(("x_t", "y_t")) for name in names) and find_target(names) is not None


def _names(path: Path) -> set[str]:
    """Return the names of the arrays in an .npz; none if the file is not one."""
    if path.suffix.lower() != ".npz" or not zipfile.is_zipfile(path):
        return set()
    with zipfile.ZipFile(path) as archive:
        return {name.removesuffix(".npy") for name in archive.namelist()}


def columns_of_matrix(array: Array) -> dict[str, Array]:
    """Return the columns 0, 1, 2, ... of a matrix; an array of another shape is one column."""
    if array.ndim == 2:
        return {str(place): array[:, place] for place in range(array.shape[1])}
    return {"0" if array.ndim == 1 else "x": array}


def _member(name: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    if info.compress_type == zipfile.ZIP_STORED:
        with open(name, "rb") as stream:
            stream.seek(info.header_offset)
            local = stream.read(30)
            # The lengths in the local header may differ from those in the directory.
            lengths = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
            stream.seek(info.header_offset + 30 + lengths)
            shape, fortran, dtype = _header(stream)
            if shape and np.prod(shape) and not dtype.hasobject:
                return np.memmap(name, dtype, "r", stream.tell(), shape, "F" if fortran else "C")
    with archive.open(info) as packed:
        return np.lib.format.read_array(packed, allow_pickle=False)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(stream)
