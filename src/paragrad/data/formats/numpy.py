"""NumPy's own files: .npy, and .npz whose arrays are the columns; mapped into memory, not read, where they are not packed."""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from paragrad.data.formats.file import TEXT, Array, Column, Handle, Jagged, even, rows_of_a_piece
from paragrad.data.source import TARGETS
from paragrad.errors import UsageError, unknown

PARTS = ("train", "test")


def open_file(path: Path, tree: str | None) -> Numpy:
    """The table in an .npy or .npz."""
    return Numpy(path, tree)


class Numpy:
    """Arrays of one length. Of an .npy, a matrix is as many columns (0, 1, 2, ...), a compound type one for each field.

    An .npz with x_train and y_train is a table of x and y for each of its parts, train and test.
    """

    def __init__(self, path: Path, part: str | None) -> None:
        self.name = str(path)
        self.index: tuple[str, ...] = ()
        self._handle = Handle(partial(_open, self.name, part))
        arrays: dict[str, Array] = self._handle.get()
        lengths = Counter(len(array) for array in arrays.values() if array.ndim)
        rows = max(lengths, key=lambda length: (lengths[length], length), default=0)
        self.columns: dict[str, Column] = {}
        self.aside: dict[str, str] = {}
        for name, array in arrays.items():
            column = _column(array.dtype, array.shape[1:])
            if not array.ndim:
                self.aside[name] = "it is a single value"
            elif len(array) != rows:
                self.aside[name] = f"it has {len(array):,} rows, the table {rows:,}"
            elif column is None:
                self.aside[name] = f"it is of type {array.dtype}"
            else:
                self.columns[name] = column
        self._size = rows_of_a_piece(self.columns.values())
        self.lengths = even(rows, self._size)

    def read(self, piece: int, names: Sequence[str]) -> dict[str, Array | Jagged]:
        """Some columns of a piece."""
        start = piece * self._size
        arrays = self._handle.get()
        return {name: np.array(arrays[name][start : start + self._size], dtype=self.columns[name].dtype) for name in names}

    def close(self) -> None:
        """Let go of the file."""
        self._handle.close()


def _column(dtype: Any, shape: tuple[int, ...]) -> Column | None:
    if dtype.kind == "U":
        return None if shape else Column(TEXT)
    return Column(dtype.newbyteorder("="), shape) if dtype.kind in "biuf" else None


def parts_of(path: Path) -> tuple[str, ...]:
    """The parts of an .npz that has any: train, and test."""
    if path.suffix.lower() != ".npz" or not zipfile.is_zipfile(path):
        return ()
    with zipfile.ZipFile(path) as archive:
        there = {name.removesuffix(".npy") for name in archive.namelist()}
    return tuple(part for part in PARTS if {f"x_{part}", f"y_{part}"} <= there) if "x_train" in there else ()


def has_columns(path: Path) -> bool:
    """Whether an .npz is a table as other files are: it has no parts, and a label that is called as labels are."""
    if path.suffix.lower() != ".npz" or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        there = {name.removesuffix(".npy") for name in archive.namelist()}
    return not any(name.startswith(("x_t", "y_t")) for name in there) and any(name in there for name in TARGETS)


def _open(name: str, part: str | None) -> dict[str, Array]:
    """Every column as an array, which is read only when it is used where that can be."""
    try:
        if Path(name).suffix.lower() == ".npz":
            parts = parts_of(Path(name))
            if part is not None and part not in parts:
                raise unknown(f"part of {name}:", part, parts)
            with zipfile.ZipFile(name) as archive:
                members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
                if parts:
                    members = {column: members[f"{column}_{part or PARTS[0]}"] for column in "xy"}
                return {column: _member(name, archive, info) for column, info in members.items()}
        array = np.load(name, mmap_mode="r", allow_pickle=False)
    except UsageError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        if "Python objects" in str(error) or "Object arrays" in str(error):
            raise UsageError(
                f"{name} holds pickled Python objects, which may run any code when they are read. Save plain numbers, of one "
                "length in every row."
            ) from error
        raise UsageError(
            f"{name} cannot be read as a NumPy file ({type(error).__name__}: {error}). It may be cut short, or of another "
            "kind: write it anew."
        ) from error
    if array.dtype.names:
        return {field: array[field] for field in array.dtype.names}
    if array.ndim == 2:
        return {str(place): array[:, place] for place in range(array.shape[1])}
    return {"0" if array.ndim == 1 else "x": array}


def _member(name: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    if info.compress_type == zipfile.ZIP_STORED:
        with open(name, "rb") as stream:
            stream.seek(info.header_offset)
            local = stream.read(30)
            # The lengths in the local header may differ from those in the directory.
            stream.seek(
                info.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
            )
            shape, fortran, dtype = _header(stream)
            if shape and np.prod(shape) and not dtype.hasobject:
                return np.memmap(name, dtype, "r", stream.tell(), shape, "F" if fortran else "C")
    with archive.open(info) as packed:
        array: Array = np.lib.format.read_array(packed, allow_pickle=False)
        return array


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    return shape, fortran, dtype
