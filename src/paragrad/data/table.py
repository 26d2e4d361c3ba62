"""pg.Table: where rows come from, and which columns are what."""

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
from paragrad.data.labels import Label, look_at_labels
from paragrad.data.opened import Opened
from paragrad.data.paths import are_classes, are_paths, files_of
from paragrad.data.select import selection
from paragrad.data.source import TARGETS
from paragrad.errors import UsageError, unknown

INDEX = re.compile(r"__index_level_\d+__")
"""What pandas calls an index without a name, in Parquet."""
UNNAMED = ("", "Unnamed: 0")
"""What it is called in CSV, and where pandas has read such a file."""
LOOKED_AT = 200
"""Rows by whose digits it is told whether float32 holds the numbers of a column."""


@dataclass(frozen=True)
class Table:
    """Rows from files, frames or arrays, with columns by name.

    Several features become one array of shape (rows, features) in float32; a single one of higher rank, such as images, keeps
    its shape. Labels that are whole numbers are classes, and so is text, in sorted order; other numbers are to be met.
    """

    source: Any
    """A path (.csv, .parquet, .h5, .root, .npy, .npz), a glob, a directory, or a list of those; for each class by name any of
    those; a pandas or polars frame; arrays by name; or a pair (x, y)."""
    features: Sequence[str] | None = None
    """Names of columns, or globs such as ``jet_*``; by default all but label and weight."""
    label: str | None = None
    """What is to be predicted; by default the column called y, target, targets, label or labels."""
    weight: str | None = None
    """How much a row counts in the loss; may be negative."""
    transforms: tuple[Any, ...] = ()
    """What is done to the columns, one after another; fitted on the rows that are trained on."""
    tree: str | None = None
    """The TTree or RNTuple of a ROOT file that has several, or a group of an HDF5 file."""
    pad: int | Mapping[str, int] | None = None
    """To how many values lists are cut, or filled up with zeros, that differ in length from row to row; for all, or by name."""
    stream: bool | None = None
    """Whether rows are read while training instead of before; by default where they would fill half of the free memory."""
    exclude: Sequence[str] | None = None
    """Columns that are no features, by name or as globs."""
    select: str | None = None
    """Which rows are used: an expression over columns, as ``"pt > 20 and njet >= 2"``."""

    def __post_init__(self) -> None:
        for name in ("features", "transforms", "exclude"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise UsageError(f"{name}={value!r} is one text, but it is a list: write {name}=[{value!r}].")
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        lengths = self.pad.values() if isinstance(self.pad, Mapping) else () if self.pad is None else (self.pad,)
        for length in lengths:
            if not isinstance(length, int) or isinstance(length, bool) or length < 1:
                raise UsageError(f"pad={self.pad}, but a length is a whole number of at least 1.")
        if self.select is not None:
            selection(self.select)  # raises where it is no expression
        if are_classes(self.source) and self.label is not None:
            raise UsageError(
                f"label={self.label!r}, but the source says for each class in which files it lies ({', '.join(self.source)}): "
                "leave the label out, or give the files as a list."
            )

    @property
    def name(self) -> str:
        """A word for messages."""
        if are_classes(self.source):
            return ", ".join(self.source)
        if are_paths(self.source):
            paths = self.source if isinstance(self.source, list | tuple) else [self.source]
            return Path(paths[0]).name if len(paths) == 1 else f"{len(paths)} paths"
        return "frame" if is_frame(self.source) else "arrays"

    def config(self) -> dict[str, Any] | None:
        """What a run.toml says of it; None where the rows were made in Python."""
        if are_classes(self.source):
            data: Any = [f"{name}={path}" for name, paths in self.source.items() for path in _listed(paths)]
        elif are_paths(self.source):
            data = [str(path) for path in _listed(self.source)]
        else:
            return None
        config = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("source", "transforms")}
        config |= {"data": data[0] if len(data) == 1 else data, "transform": [options.describe(one) for one in self.transforms]}
        config["pad"] = dict(self.pad) if isinstance(self.pad, Mapping) else self.pad
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in config.items() if value not in (None, [])
        }

    def open(self, labelled: bool = True, classes: Sequence[str] | None = None, as_classes: bool | None = None) -> Opened:
        """Look at the files, and at what is in their columns.

        ``labelled=False`` reads the features alone, to predict from; ``classes`` are those of a training, which labels name;
        ``as_classes`` says whether labels that are whole floats are numbers of classes (None: where they look it).
        """
        notes: list[str] = []
        files, origins = self._with_rows(notes)
        first = files[0]
        label = self._label(first) if labelled and not are_classes(self.source) else None
        weight = _there(first, self.weight) if labelled and self.weight is not None else None
        features = self._features(first, label, notes)
        for name in selection(self.select).names if self.select is not None else ():
            _there(first, name)
        used = [name for name in (*features, label, weight) if name is not None]
        for file in files[1:]:
            _check_same(first, file, [*used, *(selection(self.select).names if self.select else ())], self.features is None)
        aside = {name: why for name, why in first.aside.items() if name not in (self.exclude or ())}
        if self.features is None and aside:
            name, why = next(iter(aside.items()))
            more = f" (and {len(aside) - 1} more)" * (len(aside) > 1)
            notes.append(f"{first.name}: {name!r}{more} is left out, since {why}.")
        known = {name: self._padded(name, first.columns[name], files) for name in used}
        if label is not None:
            known[label] = replace(known[label], whole=all(file.columns[label].whole for file in files))
        if not self.transforms:
            for name in (*features, *([weight] if weight is not None else [])):
                _refuse_text(name, known[name], first)
        opened = Opened(
            table=self,
            files=tuple(files),
            columns=known,
            features=tuple(features),
            label=label,
            weight=weight,
            origins=origins,
            notes=tuple(notes),
            as_classes=as_classes,
        ).with_selection()
        opened = replace(opened, narrow=_narrow(files, known, opened.fed)) if self.transforms else opened
        if not labelled:
            return replace(opened, classes=tuple(classes) if classes is not None else None)
        if are_classes(self.source):
            names = tuple(self.source) if classes is None else tuple(classes)
            if len(names) < 2:
                raise UsageError(
                    f"Only one class is given, {names[0]!r}: there is nothing to tell it from. Give the others, too "
                    f"(--data {names[0]}=FILES --data other=FILES)."
                )
            strange = [name for name in self.source if name not in names]
            if strange:
                raise unknown("class", strange[0], names)
            return replace(
                opened,
                kind=Label.FILE,
                classes=names,
                origins=tuple(names.index(tuple(self.source)[place]) for place in origins),
                counts=self._rows_of_classes(opened),
            )
        return opened.with_labels(look_at_labels(opened, None if classes is None else tuple(classes), as_classes))

    @property
    def is_pair(self) -> bool:
        """Whether the rows are a pair of arrays (x, y), whose columns have numbers for names."""
        return isinstance(self.source, tuple | list) and len(self.source) == 2 and not are_paths(self.source)

    def _rows_of_classes(self, opened: Opened) -> dict[str, int]:
        """The rows of each class, where it comes from the file."""
        counts = dict.fromkeys(self.source, 0)
        lengths = iter(opened.lengths)
        for file, place in zip(opened.files, opened.origins, strict=True):
            counts[tuple(self.source)[place]] += sum(next(lengths) for _ in file.lengths)
        return counts

    def _with_rows(self, notes: list[str]) -> tuple[list[File], tuple[int, ...]]:
        """The files that have rows, and the place of each one's class."""
        files: list[File] = []
        origins: list[int] = []
        for given, place in self._files():
            # A file of no bytes is no table of its kind, but is what a job without events leaves behind.
            if isinstance(given, Path) and given.is_file() and not given.stat().st_size:
                notes.append(f"{given} is empty and is passed over.")
                continue
            file = open_file(given, self.tree) if isinstance(given, Path) else given
            file.close()  # there may be more of them than can be open
            if not sum(file.lengths):
                notes.append(f"{file.name} has no rows and is passed over.")
                continue
            files.append(file)
            origins.append(place)
        if not files:
            raise UsageError(f"There are no rows in {self.name}. {' '.join(notes)}")
        return files, tuple(origins)

    def _files(self) -> list[tuple[Path | Frame, int]]:
        """Every file, or table in memory, and the place of its class where the class comes from the file."""
        if are_classes(self.source):
            return [(file, place) for place, paths in enumerate(self.source.values()) for file in files_of(paths)]
        if are_paths(self.source):
            return [(file, 0) for file in files_of(self.source)]
        if is_frame(self.source):
            return [(Frame(columns_of(self.source), "the frame"), 0)]
        if isinstance(self.source, Mapping):
            return [(Frame({str(key): value for key, value in self.source.items()}, "the arrays"), 0)]
        if self.is_pair:
            x, y = np.asarray(self.source[0]), self.source[1]
            columns = (
                {str(place): x[:, place] for place in range(x.shape[1])} if x.ndim == 2 else {"0" if x.ndim < 2 else "x": x}
            )
            return [(Frame({**columns, "y": y}, "the arrays"), 0)]
        raise UsageError(
            f"Table(source={type(self.source).__name__}), but rows come from a path, a glob, a directory, a list of those, the "
            "same for each class by name, a pandas or polars frame, arrays by name, or a pair (x, y)."
        )

    def _label(self, file: File) -> str:
        if self.label is not None:
            return _there(file, self.label)
        for name in TARGETS:
            if name in file.columns:
                return name
        raise UsageError(
            f"Nothing says which column of {file.name} is to be predicted: give label= (--label). It has: "
            f"{', '.join(file.columns)}."
        )

    def _features(self, file: File, label: str | None, notes: list[str]) -> list[str]:
        apart = {label, self.label, self.weight}
        left_out, index = self._left_out(file), index_columns(file)
        if self.features is None:
            targets = {next((name for name in TARGETS if name in file.columns), None)} if self.label is None else set()
            found = [name for name in file.columns if name not in apart | targets | left_out]
            for name in index:
                if name in found:
                    found.remove(name)
                    called = repr(name) if name else "the first column, which has no name,"
                    notes.append(
                        f"{file.name}: {called} is an index that only names or numbers the rows. It is left out; features= "
                        "(--features) takes it."
                    )
            if not found:
                raise UsageError(f"{file.name} has no column beside its label: there is nothing to learn from.")
            return found
        found = []
        for name in self.features:
            if name in apart:
                role = "weight" if name == self.weight else "label"
                raise UsageError(
                    f"{name!r} is among the features and is the {role}: the model would be told the answer. Leave it out."
                )
            matched = (
                [name]
                if name in file.columns
                else [one for one in file.columns if fnmatchcase(one, name) and one not in apart and one not in index]
            )
            found += [one for one in matched or [_there(file, name)] if one not in found]
        found = [name for name in found if name not in left_out]
        if not found:
            raise UsageError(f"exclude={list(self.exclude or ())} leaves none of the features: there is nothing to learn from.")
        return found

    def _left_out(self, file: File) -> set[str]:
        """The columns that are to be no features."""
        found: set[str] = set()
        for name in self.exclude or ():
            matched = {name} & set(file.columns) or {one for one in file.columns if fnmatchcase(one, name)}
            if not matched and name not in file.aside:
                raise unknown(f"column of {file.name} to exclude:", name, file.columns)
            found |= matched
        return found

    def _padded(self, name: str, column: Column, files: Sequence[File]) -> Column:
        """The column as it is once its lists have one length."""
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
                f"Column {name!r} of {files[0].name} holds lists of different lengths, the longest of {longest}. Say to which "
                f"length they are cut or filled up with zeros: pad={longest} (--pad {longest}), or leave the column out."
            )
        return Column(column.dtype, (length,))


def index_columns(file: File) -> list[str]:
    """The columns that only name or number the rows, as pandas writes the index of a frame."""
    found = [name for name in file.columns if name in file.index or INDEX.fullmatch(name)]
    first = next(iter(file.columns), None)
    if first in UNNAMED and first not in found and any(file.lengths):
        values = file.read(0, [first])[first]
        if not isinstance(values, Jagged) and values.ndim == 1 and len(np.unique(values)) == len(values) and _numbers(values):
            found.append(first)
    return found


def _numbers(values: Array) -> bool:
    """Whether values number rows or name them: whole numbers, or text."""
    if values.dtype.kind == "f":
        return bool((values == np.floor(values)).all())
    return values.dtype == TEXT or values.dtype.kind in "iu"


def _listed(paths: Any) -> list[Any]:
    return list(paths) if isinstance(paths, list | tuple) else [paths]


def _there(file: File, name: str) -> str:
    if name in file.aside:
        raise UsageError(f"{name!r} in {file.name} is no column that can be used, since {file.aside[name]}.")
    if name not in file.columns:
        raise unknown(f"column of {file.name}:", name, file.columns)
    return name


def _narrow(files: Sequence[File], columns: Mapping[str, Column], names: Sequence[str]) -> frozenset[str]:
    """Return the columns of float64 whose values float32 would hold, by the first rows of the first and of the last file.

    They are transformed as float32: the same numbers then come to the same bits whether a file stores them as float32, as
    float64 or as text.
    """
    found = [name for name in names if columns[name].dtype == np.float64 and not columns[name].shape]
    for file in (files[0], files[-1]):
        first = file.read(0, found) if found else {}
        file.close()
        found = [name for name, values in first.items() if isinstance(values, np.ndarray) and fits_float32(values[:LOOKED_AT])]
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
    if column.dtype != TEXT:
        return
    values = file.read(0, [name])[name]
    assert not isinstance(values, Jagged)
    place = first_text(values)
    raise UsageError(
        f"Column {name!r} of {file.name} holds text ({values[place]!r} in row {place}), but numbers are due. Leave it out "
        "(features=, --features), or turn it into numbers by a transformation."
    )
