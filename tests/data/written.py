"""The same columns written in every format, for the tests to read back."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import awkward
import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import uproot

Columns = Mapping[str, Any]
"""Arrays by name; a list of arrays is a jagged column, an array of objects one of text."""


def as_csv(path: Path, columns: Columns, cut: int) -> Path:
    """Each number in as many digits as tell it from others of its type."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(
            zip(*(values.tolist() if values.dtype == object else map(str, values) for values in columns.values()), strict=True)
        )
    return path


def as_parquet(path: Path, columns: Columns, cut: int) -> Path:
    """Row groups of a given length."""
    arrays = {}
    for name, values in columns.items():
        if isinstance(values, np.ndarray) and values.ndim == 2:
            flat = pyarrow.array(values.reshape(-1))
            arrays[name] = pyarrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
        else:
            arrays[name] = pyarrow.array(values)
    pyarrow.parquet.write_table(pyarrow.table(arrays), path, row_group_size=cut)
    return path


def as_hdf5(path: Path, columns: Columns, cut: int) -> Path:
    """One dataset for each column, in chunks of a given length."""
    with h5py.File(path, "w", track_order=True) as file:
        for name, values in columns.items():
            if isinstance(values, list):
                made = file.create_dataset(name, (len(values),), h5py.vlen_dtype(values[0].dtype))
                for row, value in enumerate(values):
                    made[row] = value
            elif values.dtype == object:
                file.create_dataset(name, data=values, dtype=h5py.string_dtype())
            else:
                file.create_dataset(name, data=values, chunks=(min(cut, len(values)), *values.shape[1:]))
    return path


def as_compound(path: Path, columns: Columns, cut: int) -> Path:
    """One dataset of a compound type."""
    length = len(next(iter(columns.values())))
    kinds = [
        (name, h5py.string_dtype() if values.dtype == object else values.dtype, values.shape[1:])
        for name, values in columns.items()
    ]
    rows = np.empty(length, dtype=kinds)
    for name, values in columns.items():
        rows[name] = values
    with h5py.File(path, "w") as file:
        file.create_dataset("events", data=rows, chunks=(min(cut, length),))
    return path


def as_tree(path: Path, columns: Columns, cut: int) -> Path:
    """A TTree, in baskets of a given length."""
    kinds = {}
    for name, values in columns.items():
        if isinstance(values, list):
            kinds[name] = f"var * {values[0].dtype.name}"
        else:
            kinds[name] = str if values.dtype == object else np.dtype((values.dtype, values.shape[1:]))
    with uproot.recreate(path) as file:
        tree = file.mktree("events", kinds)
        _extend(tree, columns, cut)
    return path


def as_rntuple(path: Path, columns: Columns, cut: int) -> Path:
    """An RNTuple, in clusters of a given length."""
    with uproot.recreate(path) as file:
        made = file.mkrntuple("events", {name: _awkward(values[:cut]) for name, values in columns.items()})
        _extend(made, {name: values[cut:] for name, values in columns.items()}, cut)
    return path


def as_npz(path: Path, columns: Columns, cut: int) -> Path:
    """Every other one packed."""
    (np.savez if cut % 2 else np.savez_compressed)(
        path, **{name: values.astype(str) if values.dtype == object else values for name, values in columns.items()}
    )
    return path


def as_npy(path: Path, columns: Columns, cut: int) -> Path:
    """One array of a compound type."""
    kinds = [(name, "U9" if values.dtype == object else values.dtype, values.shape[1:]) for name, values in columns.items()]
    rows = np.empty(len(next(iter(columns.values()))), dtype=kinds)
    for name, values in columns.items():
        rows[name] = values
    np.save(path, rows)
    return path


def _awkward(values: Any) -> Any:
    if isinstance(values, list):
        return awkward.unflatten(np.concatenate(values), [len(value) for value in values])
    return awkward.Array(values.tolist() if values.dtype == object else values)


def _extend(tree: Any, columns: Columns, cut: int) -> None:
    length = len(next(iter(columns.values())))
    for start in range(0, length, cut):
        tree.extend({name: _awkward(values[start : start + cut]) for name, values in columns.items()})


WRITERS: dict[str, tuple[str, Callable[[Path, Columns, int], Path]]] = {
    "csv": (".csv", as_csv),
    "parquet": (".parquet", as_parquet),
    "hdf5": (".h5", as_hdf5),
    "compound": (".hdf5", as_compound),
    "ttree": (".root", as_tree),
    "rntuple": (".root", as_rntuple),
    "npz": (".npz", as_npz),
    "npy": (".npy", as_npy),
}
