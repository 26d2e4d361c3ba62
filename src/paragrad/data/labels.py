"""Kinds of labels, by one rule for tables and arrays: classes, given by number or by name, or numbers to predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paragrad.data import progress
from paragrad.data.formats.file import TEXT, Array
from paragrad.errors import UsageError, unknown

if TYPE_CHECKING:
    from paragrad.data.opened import Opened

MOST_CLASSES = 100
"""Largest number of classes if labels are floats."""
COUNTED = 10_000
"""Number of different labels up to which the rows of each are counted."""


class Label(Enum):
    """Kind of a label."""

    FILE = "the place of the file's class"
    TEXT = "a name of a class"
    WHOLE = "a whole number"
    REAL = "any number"


@dataclass
class Meaning:
    """Options for reading the targets of arrays; after reading, also the classes found."""

    as_classes: bool | None = None
    """True if whole floats are class numbers; None: only if they are exactly 0, 1, ..., K - 1 with K up to 100."""
    classes: tuple[str, ...] | None = None
    """Names of the classes, if they have names: those of a training, or those found."""
    note: str | None = None

    def of_text(self, values: Array, where: str) -> torch.Tensor:
        """Return the class numbers of an array of class names; classes are numbered in sorted order."""
        names = values.tolist()
        found = self.classes or tuple(sorted({str(value) for value in names}))
        numbers = _numbers(names, found, lambda row: f"{where} in row {row}")
        self.classes = found
        return torch.tensor(numbers, dtype=torch.int64)

    def of_numbers(self, target: torch.Tensor) -> torch.Tensor:
        """Return the targets, as int64 if they are class numbers."""
        if not target.is_floating_point() or target.ndim != 1 or self.as_classes is False:
            return target
        values = torch.unique(target)
        whole = bool((values == values.floor()).all() and (values.abs() < 2**53).all())
        if not whole or not (self.as_classes or _are_class_numbers(values.tolist())):
            return target
        self.note = _float_note(len(values))
        return target.to(torch.int64)


def _are_class_numbers(values: Collection[float]) -> bool:
    """Return whether floats are class numbers: they are exactly 0, 1, ..., K - 1, with K up to ``MOST_CLASSES``."""
    return 2 <= len(values) <= MOST_CLASSES and set(values) == set(range(len(values)))


def _float_note(count: int) -> str:
    return (
        f"The labels are stored as floats, but are 0 to {count - 1}: they are taken as {count} classes. "
        "(To predict them as numbers, give loss='mse' or --loss mse.)"
    )


def _numbers(values: Collection[Any], classes: Sequence[str], where: Callable[[int], str]) -> list[int]:
    """Return the numbers of the classes that ``values`` name. ``where`` describes a row in the error."""
    known = {name: number for number, name in enumerate(classes)}
    for row, value in enumerate(values):
        if value not in known:
            raise UsageError(f"Label {where(row)}: {unknown('class', str(value), classes)}")
    return [known[value] for value in values]


def is_text(data: Any) -> bool:
    """Return whether targets are names of classes: an array or a list of text."""
    if isinstance(data, list):
        return bool(data) and all(isinstance(value, str) for value in data)
    if isinstance(data, torch.Tensor) or not hasattr(data, "__array__"):
        return False
    if getattr(getattr(data, "dtype", None), "kind", None) in ("U", "T"):
        return True
    array = np.asarray(data)
    return array.dtype.kind in "UTO" and array.ndim == 1 and len(array) > 0 and all(isinstance(value, str) for value in array)


def indices(values: Array, classes: Sequence[str], opened: Opened, piece: int) -> Array:
    """Return the class numbers of a column of class names."""

    def where(row: int) -> str:
        file, row = opened.locate(piece, row)
        return f"{opened.label!r} in row {row} of {file}"

    return np.array(_numbers(values, classes, where), dtype=np.int64)


def with_labels(opened: Opened, classes: tuple[str, ...] | None, as_classes: bool | None = None) -> Opened:
    """Return the table with the kind of its labels and their classes. All labels are read, because a single one can decide.

    ``as_classes`` tells whether whole floats are class numbers; None: only if they are exactly 0, 1, ..., K - 1.
    """
    assert opened.label is not None
    names: Counter[Any] = Counter()
    numbers: Counter[Any] = Counter()
    whole, typed = True, opened.fitted is not None or not opened.columns[opened.label].whole
    floats = flat = False
    done = 0
    for piece, length in enumerate(opened.lengths):
        if not length:
            continue
        columns = opened.raw(piece, [opened.label]) if opened.fitted is None else opened.transformed(piece)
        values = columns[opened.label]
        done += length
        progress.report(f"looking at the labels of {opened.table.name}", done, len(opened))
        if values.dtype == TEXT:
            if "" in values:
                file, row = opened.locate(piece, int(np.argmax(values == "")))
                raise UsageError(f"The label {opened.label!r} is missing in row {row} of {file}: leave such rows out.")
            if classes is not None:
                indices(values, classes, opened, piece)
            names.update(values.tolist())
            continue
        if values.dtype.kind == "f":
            bad = ~np.isfinite(values.reshape(len(values), -1)).all(1)
            if bad.any() and not opened.table.transforms:
                file, row = opened.locate(piece, int(bad.argmax()))
                raise UsageError(f"The label {opened.label!r} is NaN or infinite in row {row} of {file}: leave such rows out.")
            whole = whole and bool((values == np.floor(values)).all()) and bool((np.abs(values) < 2**53).all())
            floats = floats or typed
        flat = values.ndim == 1
        if whole and flat and len(numbers) <= COUNTED:
            found, counts = np.unique(values, return_counts=True)
            numbers.update(dict(zip(found.astype(np.int64).tolist(), counts.tolist(), strict=True)))
    if names:
        return replace(opened, kind=Label.TEXT, classes=classes or tuple(sorted(names)), counts=names)
    if floats and flat and whole:
        whole = _are_class_numbers(numbers) if as_classes is None else as_classes
    elif floats:
        # Several targets per row keep their type if the loss takes numbers.
        whole = whole and as_classes is not False
    counted = numbers if whole and flat and len(numbers) <= COUNTED else None
    notes = (*opened.notes, _float_note(len(numbers))) if floats and whole and flat else opened.notes
    kind = Label.WHOLE if whole else Label.REAL
    return replace(opened, kind=kind, classes=classes or opened.classes, counts=counted, notes=notes)
