"""Find the files that a user gives as a path, a glob, a directory, or a list of those."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paragrad.data.formats import SUFFIXES
from paragrad.errors import UsageError


def are_paths(thing: Any) -> bool:
    """Return whether this is a path or a list of paths."""
    if isinstance(thing, list | tuple):
        return bool(thing) and all(isinstance(one, str | Path) for one in thing)
    return isinstance(thing, str | Path)


def are_classes(thing: Any) -> bool:
    """Return whether this maps the name of each class to its files."""
    return isinstance(thing, Mapping) and bool(thing) and all(are_paths(value) for value in thing.values())


def as_list(paths: Any) -> list[Any]:
    """Return one path, or several, as a list."""
    return list(paths) if isinstance(paths, list | tuple) else [paths]


def files_of(source: Any) -> list[Path]:
    """Return every file that the paths, globs and directories name, in order. Raise if one is named twice."""
    found: list[Path] = []
    for one in as_list(source):
        for path in _files(Path(one).expanduser()):
            if path in found:
                raise UsageError(f"{path} is given twice, so each of its rows would be trained on twice: name it once.")
            found.append(path)
    return found


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        tables = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith("."))
        if not tables:
            raise UsageError(
                f"The directory {path} has no table: no file in it ends in {', '.join(SUFFIXES)}. For files in its "
                f"subdirectories, give a glob such as '{path}/**/*.parquet'."
            )
        return tables
    if not path.exists() and glob.has_magic(str(path)):
        matched = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        if not matched:
            raise UsageError(f"No file matches {str(path)!r}. In a shell, quote the glob so that the shell does not expand it.")
        return [file for one in matched for file in (_files(one) if one.is_dir() else [one])]
    return [path]
