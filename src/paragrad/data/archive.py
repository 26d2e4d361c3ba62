"""NumPy archives with a part to train on and an optional part to test on: x_train, y_train, x_test, y_test."""

from __future__ import annotations

import zipfile
import zlib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from paragrad.data.labels import Meaning, is_text
from paragrad.data.source import Arrays
from paragrad.data.trees import as_inputs, as_labels, check_rows, converted
from paragrad.errors import UsageError

KEYS = ("x_train", "y_train", "x_test", "y_test")


def read(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of an .npz that are in ``KEYS``; others are not decompressed."""
    if not file.is_file():
        raise UsageError(f"{file} {'is a directory' if file.is_dir() else 'does not exist'}. Give the path of an .npz file.")
    try:
        with file.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise UsageError(f"{file} holds one array only. Write an .npz: np.savez(path, x_train=..., y_train=...).")
            with archive:
                for key in KEYS[:2]:
                    if key not in archive.files:
                        near = get_close_matches(key, set(archive.files) - set(KEYS), n=1)
                        hint = f" Rename {near[0]!r}?" if near else ""
                        raise UsageError(
                            f"{file} has no array {key!r}.{hint} It has: {', '.join(archive.files) or 'none at all'}. "
                            "Write it by np.savez(path, x_train=..., y_train=..., x_test=..., y_test=...), or with x and y."
                        )
                return {key: archive[key] for key in archive.files if key in KEYS}
    except UsageError:
        raise
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        if "pickle" in str(error) and zipfile.is_zipfile(file):
            raise UsageError(
                f"{file} holds pickled Python objects, which can run any code when they are read. Save plain numbers: "
                "np.savez(path, x_train=x.astype('float32'), ...)."
            ) from error
        raise UsageError(
            f"{file} cannot be read as an .npz ({type(error).__name__}: {error}). It may be truncated, or have another format: "
            "write it again by np.savez(path, x_train=..., y_train=...)."
        ) from error


def part_of(
    found: dict[str, np.ndarray[Any, Any]], part: str, file: Path, meaning: Meaning, notes: list[str], *, keras: bool
) -> Arrays:
    """Return the part called train or test, read like the same arrays in Python."""
    x, y = found[f"x_{part}"], found.get(f"y_{part}")
    if y is None:
        raise UsageError(f"{file} has x_{part} but no y_{part}. Add y_{part}, or leave both out.")
    labels: Any = meaning.of_text(y, f"{file.name}['y_{part}']") if is_text(y) else y
    named = converted({f"x_{part}": x, f"y_{part}": labels}, file.name)
    check_rows(named, file.name)
    tree = named[f"x_{part}"], meaning.of_numbers(as_labels(named[f"y_{part}"]))
    return Arrays(tree if keras else as_inputs(tree, notes, file.name))
