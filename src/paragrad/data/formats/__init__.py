"""Tables in files and in memory. Every format has the same interface: columns by name, and rows in pieces."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from paragrad.data.formats.file import File
from paragrad.errors import UsageError

SUFFIXES = {
    ".csv": "csv.Csv",
    ".tsv": "csv.Csv",
    ".parquet": "parquet.Parquet",
    ".pq": "parquet.Parquet",
    ".h5": "hdf5.Hdf5",
    ".hdf5": "hdf5.Hdf5",
    ".root": "root.Root",
    ".npy": "numpy.Numpy",
    ".npz": "numpy.Numpy",
}
"""Module and class that read a file, by the suffix of the file's name."""


def open_file(path: Path, tree: str | None = None) -> File:
    """Return the table in a file. ``tree`` is the TTree or RNTuple of a ROOT file, or the group of an HDF5 file."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(
            f"{path} ends in {suffix or 'nothing'!r}, but a table is a file that ends in {', '.join(SUFFIXES)}: rename it, or "
            "write it in one of these formats."
        )
    if not path.exists():
        raise UsageError(f"{path} does not exist. Give the path of a file, a glob such as 'data/*.parquet', or a directory.")
    module, _, name = SUFFIXES[suffix].partition(".")
    opened: File = getattr(import_module(f"{__name__}.{module}"), name)(path, tree)
    return opened
