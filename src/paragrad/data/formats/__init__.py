"""Tables in files and in memory, each format behind one protocol: columns by name, and rows in pieces."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from paragrad.data.formats.file import File
from paragrad.errors import UsageError

SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".root": "root",
    ".npy": "numpy",
    ".npz": "numpy",
}
"""The module that reads a file, by how its name ends."""


def open_file(path: Path, tree: str | None = None) -> File:
    """The table in a file; ``tree`` is the TTree or RNTuple of a ROOT file, or the group of an HDF5 file."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(
            f"{path} ends in {suffix or 'nothing'!r}, but a table is a file that ends in {', '.join(SUFFIXES)}: rename it, or "
            "write it as one of these."
        )
    if not path.exists():
        raise UsageError(f"{path} is not there. Give the path of a file, a glob such as 'data/*.parquet', or a directory.")
    opened: File = import_module(f"paragrad.data.formats.{SUFFIXES[suffix]}").open_file(path, tree)
    return opened
