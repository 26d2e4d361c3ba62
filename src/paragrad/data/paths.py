"""From what users write for files (a path, a glob, a directory, a list of those) to the files."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paragrad.data.formats import SUFFIXES
from paragrad.errors import UsageError


def are_paths(thing: Any) -> bool:
    """Whether it is a path, or a list of paths."""
    if isinstance(thing, list | tuple):
        return bool(thing) and all(isinstance(one, str | Path) for one in thing)
    return isinstance(thing, str | Path)


def are_classes(thing: Any) -> bool:
    """Whether it says for each class in which files it lies."""
    return isinstance(thing, Mapping) and bool(thing) and all(are_paths(value) for value in thing.values())


def files_of(source: Any) -> list[Path]:
    """Every file meant, in order, none twice."""
    found: list[Path] = []
    for one in source if isinstance(source, list | tuple) else [source]:
        for path in _files(Path(one).expanduser()):
            if path in found:
                raise UsageError(f"{path} is given twice, so that each of its rows would be trained on twice: name it once.")
            found.append(path)
    return found


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        there = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith("."))
        if not there:
            raise UsageError(
                f"{path} is a directory that holds no table: no file in it ends in {', '.join(SUFFIXES)}. (Files further down "
                f"are matched by a glob such as '{path}/**/*.parquet'.)"
            )
        return there
    if not path.exists() and glob.has_magic(str(path)):
        matched = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        if not matched:
            raise UsageError(f"No file matches {str(path)!r}. (In a shell, quote a glob, so that it comes here as it is.)")
        return [file for one in matched for file in (_files(one) if one.is_dir() else [one])]
    return [path]
