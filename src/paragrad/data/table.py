"""pg.Table: the source of rows, and the roles of their columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from paragrad.config import options
from paragrad.data.formats import open_file
from paragrad.data.formats.file import TEXT, Array, Column, File, Jagged, first_text, fits_float32
from paragrad.data.formats.frame import Frame, columns_of, is_frame
from paragrad.data.formats.numpy import columns_of_matrix
from paragrad.data.labels import Label, with_labels
from paragrad.data.opened import Opened, text_error
from paragrad.data.paths import are_classes, are_paths, as_list, files_of
from paragrad.data.select import selection
from paragrad.data.source import TARGETS, find_target
from paragrad.errors import UsageError, unknown

INDEX = re.compile(r"__index_level_\d+__")
"""Name that pandas gives an unnamed index in Parquet."""
UNNAMED = ("", "Unnamed: 0")
"""Names of an unnamed index in CSV, and after pandas has read such a file."""
SAMPLED = 200
"""Rows that are checked to decide whether float32 holds all digits of a column."""


@dataclass(frozen=True)
class Table:
    """Rows from files, frames or arrays, with named columns.

    Several features become one float32 array of shape (rows, features); a single feature of higher rank, such as images,
    keeps its shape. Whole-number labels are classes. So is text, in sorted order. Other numbers are regression targets.
    """

    source: Any
    """A path (.csv, .parquet, .h5, .root, .npy, .npz), a glob, a directory, or a list of those; a dict of those by class name;
    a pandas or polars frame; a dict of arrays; or a pair (x, y)."""
    features: Sequence[str] | None = None
    """Names of columns, or globs such as ``jet_*``; by default all except label and weight."""
    label: str | None = None
    """Column to predict; by default the one called y, target, targets, label or labels."""
    weight: str | None = None
    """Column that holds how much each row counts in the loss; may be negative."""
    transforms: tuple[Any, ...] = ()
    """Transformations of the columns, applied in order and fitted on the training rows."""
    tree: str | None = None
    """The TTree or RNTuple to read if a ROOT file has several, or a group of an HDF5 file."""
    pad: int | Mapping[str, int] | None = None
    """Length to which lists of different lengths are cut or padded with zeros; for all columns, or by name."""
    stream: bool | None = None
    """True to read rows during training instead of before; by default if they would fill half of the free memory."""
    exclude: Sequence[str] | None = None
    """Columns that are not features, by name or as globs."""
    select: str | None = None
    """Expression over columns that selects the rows to use, such as ``"pt > 20 and njet >= 2"``."""

    def __post_init__(self) -> None:
        for name in ("features", "transforms", "exclude"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise UsageError(f"{name}={value!r} is one text, but it must be a list: write {name}=[{value!r}].")
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        lengths = self.pad.values() if isinstance(self.pad, Mapping) else () if self.pad is None else (self.pad,)
        for length in lengths:
            if not isinstance(length, int) or isinstance(length, bool) or length < 1:
                raise UsageError(f"pad={self.pad}, but a length must be a whole number of at least 1.")
        if self.select is not None:
            selection(self.select)  # raises if it is not an expression
        if are_classes(self.source) and self.label is not None:
            raise UsageError(
                f"label={self.label!r}, but the source gives the files of each class ({', '.join(self.source)}): leave the "
                "label out, or give the files as a list."
            )

    @property
    def name(self) -> str:
        """Name in messages."""
        if are_classes(self.source):
            return ", ".join(self.source)
        if are_paths(self.source):
            paths = as_list(self.source)
            return Path(paths[0]).name if len(paths) == 1 else f"{len(paths)} paths"
        return "frame" if is_frame(self.source) else "arrays"

    @property
    def is_pair(self) -> bool:
        """True if the rows are a pair of arrays (x, y), whose columns are called 0, 1, 2, ..."""
        return isinstance(self.source, tuple | list) and len(self.source) == 2 and not are_paths(self.source)

    def config(self) -> dict[str, Any] | None:
        """Return the table's options for run.toml; None if the rows were made in Python."""
        if are_classes(self.source):
            data: Any = [f"{name}={path}" for name, paths in self.source.items() for path in as_list(paths)]
        elif are_paths(self.source):
            data = [str(path) for path in as_list(self.source)]
        else:
            return None
        config = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("source", "transforms")}
        config |= {"data": data[0] if len(data) == 1 else data, "transform": [options.describe(one) for one in self.transforms]}
        config["pad"] = dict(self.pad) if isinstance(self.pad, Mapping) else self.pad
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in config.items() if value not in (None, [])
        }

    def open(self, labelled: bool = True, classes: Sequence[str] | None = None, as_classes: bool | None = None) -> Opened:
        """Open the files and inspect their columns.

        ``labelled=False`` reads the features only, for prediction. ``classes`` are the class names of a training, if labels
        must use them. ``as_classes`` tells whether whole floats are class numbers; None: only if exactly 0, 1, ..., K - 1.
        """
        notes: list[str] = []
        known = None if classes is None else tuple(classes)
        files, origins = self._open_files(notes)
        first = files[0]
        label = self._label(first) if labelled and not are_classes(self.source) else None
        weight = _present(first, self.weight) if labelled and self.weight is not None else None
        features = self._features(first, label, notes)
        used = [name for name in (*features, label, weight) if name is not None]
        selecting = () if self.select is None else selection(self.select).names
        for name in selecting:
            _present(first, name)
        for file in files[1:]:
            _check_same(first, file, [*used, *selecting], self.features is None)
        aside = {name: why for name, why in first.aside.items() if name not in (self.exclude or ())}
        if self.features is None and aside:
            name, why = next(iter(aside.items()))
            more = f" (and {len(aside) - 1} more)" * (len(aside) > 1)
            notes.append(f"{first.name}: {name!r}{more} is left out, because {why}.")
        columns = {name: self._padded(name, first.columns[name], files) for name in used}
        if label is not None:
            columns[label] = replace(columns[label], whole=all(file.columns[label].whole for file in files))
        if not self.transforms:
            for name in used:
                if name != label:
                    _refuse_text(name, columns[name], first)
        opened = Opened(
            self, tuple(files), columns, tuple(features), label, weight, origins, tuple(notes), as_classes=as_classes
        ).with_selection()
        if self.transforms:
            opened = replace(opened, narrow=_narrow(files, columns, opened.transform_inputs))
        if not labelled:
            return replace(opened, classes=known)
        if are_classes(self.source):
            return self._with_classes(opened, known)
        return with_labels(opened, known, as_classes)

    def _with_classes(self, opened: Opened, known: tuple[str, ...] | None) -> Opened:
        """Return the table with the classes that its source names."""
        own = tuple(self.source)
        names = own if known is None else known
        if len(names) < 2:
            raise UsageError(
                f"Only one class is given, {names[0]!r}: there is nothing to distinguish it from. Give the other classes, too "
                f"(--data {names[0]}=FILES --data other=FILES)."
            )
        for name in own:
            if name not in names:
                raise unknown("class", name, names)
        counts = dict.fromkeys(own, 0)
        lengths = iter(opened.lengths)
        for file, place in zip(opened.files, opened.origins, strict=True):
            counts[own[place]] += sum(next(lengths) for _ in file.lengths)
        origins = tuple(names.index(own[place]) for place in opened.origins)
        return replace(opened, kind=Label.FILE, classes=names, origins=origins, counts=counts)

    def _open_files(self, notes: list[str]) -> tuple[list[File], tuple[int, ...]]:
        """Return the files that have rows, and the place of each one's class."""
        files: list[File] = []
        origins: list[int] = []
        for given, place in self._files():
            # A job without events may leave a file of 0 bytes, which no format can read.
            if isinstance(given, Path) and given.is_file() and not given.stat().st_size:
                notes.append(f"{given} is empty and is skipped.")
                continue
            file = open_file(given, self.tree) if isinstance(given, Path) else given
            file.close()  # there may be more files than can be open at once
            if not sum(file.lengths):
                notes.append(f"{file.name} has no rows and is skipped.")
                continue
            files.append(file)
            origins.append(place)
        if not files:
            raise UsageError(f"{self.name} has no rows. {' '.join(notes)}")
        return files, tuple(origins)

    def _files(self) -> list[tuple[Path | Frame, int]]:
        """Return every file, or table in memory, with the place of its class if the source names classes."""
        if are_classes(self.source):
            return [(file, place) for place, paths in enumerate(self.source.values()) for file in files_of(paths)]
        if are_paths(self.source):
            return [(file, 0) for file in files_of(self.source)]
        if is_frame(self.source):
            return [(Frame(columns_of(self.source), "the frame"), 0)]
        if isinstance(self.source, Mapping):
            return [(Frame({str(key): value for key, value in self.source.items()}, "the arrays"), 0)]
        if self.is_pair:
            return [(Frame({**columns_of_matrix(np.asarray(self.source[0])), "y": self.source[1]}, "the arrays"), 0)]
        raise UsageError(
            f"Table(source={type(self.source).__name__}), but rows come from a path, a glob, a directory, a list of those, a "
            "dict of those by class name, a pandas or polars frame, a dict of arrays, or a pair (x, y)."
        )

    def _label(self, file: File) -> str:
        if self.label is not None:
            return _present(file, self.label)
        name = find_target(file.columns)
        if name is None:
            raise UsageError(
                f"No label is given for {file.name}, and none of its columns is called {', '.join(TARGETS)}: give label= "
                f"(--label). It has: {', '.join(file.columns)}."
            )
        return name

    def _features(self, file: File, label: str | None, notes: list[str]) -> list[str]:
        apart = {label, self.label, self.weight}
        excluded, index = self._excluded(file), _index_columns(file)
        if self.features is None:
            target = find_target(file.columns) if self.label is None else None
            found = [name for name in file.columns if name not in apart | excluded | {target}]
            for name in index:
                if name in found:
                    found.remove(name)
                    called = repr(name) if name else "the first column, which has no name,"
                    notes.append(
                        f"{file.name}: {called} is an index that only names or numbers the rows. It is left out; to use it, "
                        "name it in features= (--features)."
                    )
            if not found:
                raise UsageError(f"{file.name} has no column besides its label: there is nothing to learn from.")
            return found
        found = []
        for name in self.features:
            if name in apart:
                role = "weight" if name == self.weight else "label"
                raise UsageError(f"{name!r} is among the features and is the {role}, so the model would see it: leave it out.")
            if name in file.columns:
                matched = [name]
            else:
                matched = [one for one in file.columns if fnmatchcase(one, name) and one not in apart and one not in index]
            found += [one for one in matched or [_present(file, name)] if one not in found]
        found = [name for name in found if name not in excluded]
        if not found:
            raise UsageError(f"exclude={list(self.exclude or ())} leaves none of the features: there is nothing to learn from.")
        return found

    def _excluded(self, file: File) -> set[str]:
        found: set[str] = set()
        for name in self.exclude or ():
            matched = {name} & set(file.columns) or {one for one in file.columns if fnmatchcase(one, name)}
            if not matched and name not in file.aside:
                raise unknown(f"column of {file.name} to exclude:", name, file.columns)
            found |= matched
        return found

    def _padded(self, name: str, column: Column, files: Sequence[File]) -> Column:
        """Return the column with its lists padded to one length."""
        if not column.jagged:
            return column
        length = self.pad.get(name) if isinstance(self.pad, Mapping) else self.pad
        if length is None:
            longest = 0
            for file in files:
                for piece in range(len(file.lengths)):
                    values = file.read(piece, [name])[name]
                    assert isinstance(values, Jagged)
                    longest = max(longest, int(values.counts.max(initial=0)))
            raise UsageError(
                f"Column {name!r} of {files[0].name} holds lists of different lengths, the longest of {longest}. Give the "
                f"length to which they are cut or padded with zeros: pad={longest} (--pad {longest}), or leave the column out."
            )
        return Column(column.dtype, (length,))


def _index_columns(file: File) -> list[str]:
    """Return the columns that only name or number the rows, such as the index of a pandas frame."""
    found = [name for name in file.columns if name in file.index or INDEX.fullmatch(name)]
    first = next(iter(file.columns), None)
    if first in UNNAMED and first not in found and any(file.lengths):
        values = file.read(0, [first])[first]
        if not isinstance(values, Jagged) and values.ndim == 1 and len(np.unique(values)) == len(values) and _numbers(values):
            found.append(first)
    return found


def _numbers(values: Array) -> bool:
    """Return whether values can number or name rows: whole numbers, or text."""
    if values.dtype.kind == "f":
        return bool((values == np.floor(values)).all())
    return values.dtype == TEXT or values.dtype.kind in "iu"


def _present(file: File, name: str) -> str:
    """Return the name of a column. Raise if the file does not have it."""
    if name in file.aside:
        raise UsageError(f"{name!r} in {file.name} cannot be used as a column, because {file.aside[name]}.")
    if name not in file.columns:
        raise unknown(f"column of {file.name}:", name, file.columns)
    return name


def _narrow(files: Sequence[File], columns: Mapping[str, Column], names: Sequence[str]) -> frozenset[str]:
    """Return the columns of float64 whose values float32 can hold, judged by the first rows of the first and the last file.

    They are transformed as float32: the same numbers then come to the same bits whether a file stores them as float32, as
    float64 or as text.
    """
    found = [name for name in names if columns[name].dtype == np.float64 and not columns[name].shape]
    for file in (files[0], files[-1]):
        first = file.read(0, found) if found else {}
        file.close()
        found = [name for name, values in first.items() if isinstance(values, np.ndarray) and fits_float32(values[:SAMPLED])]
    return frozenset(found)


def _check_same(first: File, file: File, used: Sequence[str], every: bool) -> None:
    for name in used:
        if name not in file.columns:
            raise UsageError(f"{first.name} has a column {name!r}, but {file.name} has none: give files with the same columns.")
        one, other = first.columns[name], file.columns[name]
        if one != other:
            raise UsageError(
                f"Column {name!r} is {one} in {first.name}, but {other} in {file.name}: write both with the same type."
            )
    more = [name for name in file.columns if name not in first.columns]
    if every and more:
        raise UsageError(
            f"{file.name} has a column {more[0]!r}, but {first.name} has none: give files with the same columns, or name the "
            "features (features=, --features)."
        )


def _refuse_text(name: str, column: Column, file: File) -> None:
    if column.dtype == TEXT:
        values = file.read(0, [name])[name]
        assert not isinstance(values, Jagged)
        row = first_text(values)
        raise text_error(name, values[row], file.name, row)
