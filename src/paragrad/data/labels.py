"""What labels are: classes, by number or by name, or numbers to be met; of a table and of arrays, by one rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
"""Classes that may be numbered by floats."""
COUNTED = 10_000
"""Different labels that are counted."""


class Label(Enum):
    """What a label is."""

    FILE = "the place of the file's class"
    TEXT = "a name of a class"
    WHOLE = "a whole number"
    REAL = "any number"


@dataclass(frozen=True)
class Labels:
    """What is known of the labels of a table."""

    kind: Label
    classes: tuple[str, ...] | None
    """Their names, where they have any."""
    counts: Mapping[Any, int] | None = None
    """Rows of each class, by name or number; None where labels are no classes."""
    note: str | None = None


@dataclass
class Meaning:
    """How the targets of arrays are to be taken; once they are read, what they are."""

    as_classes: bool | None = None
    """Whether floats that are whole are numbers of classes; None: where they are 0, 1, ... up to some number below 100."""
    classes: tuple[str, ...] | None = None
    """The names of the classes, where they have any: those of a training, or those found."""
    note: str | None = None

    def of_text(self, values: Array, where: str) -> torch.Tensor:
        """The numbers of the classes that an array of text names, in sorted order."""
        found = self.classes or tuple(sorted({str(value) for value in values.tolist()}))
        places = {name: place for place, name in enumerate(found)}
        for row, value in enumerate(values.tolist()):
            if value not in places:
                raise UsageError(f"Label {where} in row {row}: {unknown('class', str(value), found)}")
        self.classes = found
        return torch.tensor([places[value] for value in values.tolist()], dtype=torch.int64)

    def of_numbers(self, target: torch.Tensor) -> torch.Tensor:
        """The targets, as int64 where they are numbers of classes."""
        if not target.is_floating_point() or target.ndim != 1 or self.as_classes is False:
            return target
        values = torch.unique(target)
        whole = bool((values == values.floor()).all() and (values.abs() < 2**53).all())
        if not whole or not (self.as_classes or are_numbered(values.tolist())):
            return target
        self.note = said(len(values))
        return target.to(torch.int64)


def are_numbered(values: Collection[float]) -> bool:
    """Whether floats number classes: they are 0, 1, ..., each of them, and not too many."""
    return 2 <= len(values) <= MOST_CLASSES and set(values) == set(range(len(values)))


def said(count: int) -> str:
    """What is said aloud where floats are taken for classes."""
    return (
        f"The labels are stored as floats, but are 0 to {count - 1}: they are taken as {count} classes. "
        "(To predict them as numbers, give loss='mse' or --loss mse.)"
    )


def is_text(data: Any) -> bool:
    """Whether targets are names of classes: an array or a list of text."""
    if isinstance(data, list):
        return bool(data) and all(isinstance(value, str) for value in data)
    kind = getattr(getattr(data, "dtype", None), "kind", None)
    if isinstance(data, torch.Tensor) or not hasattr(data, "__array__"):
        return False
    if kind in ("U", "T"):
        return True
    array = np.asarray(data)
    return array.dtype.kind in "UTO" and array.ndim == 1 and len(array) > 0 and all(isinstance(value, str) for value in array)


def indices(values: Array, classes: Sequence[str], opened: Opened, piece: int) -> Array:
    """The numbers of the classes that a column of text names."""
    known = {name: place for place, name in enumerate(classes)}
    for row, value in enumerate(values):
        if value not in known:
            file, row = opened.place(piece, row)
            wrong = unknown("class", str(value), classes)
            raise UsageError(f"Label {opened.label!r} in row {row} of {file}: {wrong}")
    return np.array([known[value] for value in values], dtype=np.int64)


def look_at_labels(opened: Opened, classes: tuple[str, ...] | None, as_classes: bool | None = None) -> Labels:
    """What the labels are, and the names of their classes: all of them are looked at, since one alone can decide it.

    ``as_classes`` says whether floats that are whole are numbers of classes; None: where they look it.
    """
    assert opened.label is not None
    names: Counter[Any] = Counter()
    numbers: Counter[Any] = Counter()
    whole, typed = True, opened.fitted is not None or not opened.columns[opened.label].whole
    floats = flat = False
    seen = 0
    for piece, length in enumerate(opened.lengths):
        if not length:
            continue
        if opened.fitted is None:
            values = opened.raw(piece, [opened.label])[opened.label]
        else:
            values = opened.transformed(piece)[opened.label]
        seen += length
        progress.tell(f"looking at the labels of {opened.table.name}", seen, len(opened))
        if values.dtype == TEXT:
            if "" in values:
                file, row = opened.place(piece, int(np.argmax(values == "")))
                raise UsageError(f"The label {opened.label!r} is missing in row {row} of {file}: leave such rows out.")
            if classes is not None:
                indices(values, classes, opened, piece)
            names.update(values.tolist())
            continue
        if values.dtype.kind == "f":
            bad = ~np.isfinite(values.reshape(len(values), -1)).all(1)
            if bad.any() and not opened.table.transforms:
                file, row = opened.place(piece, int(bad.argmax()))
                raise UsageError(f"The label {opened.label!r} is NaN or infinite in row {row} of {file}: leave such rows out.")
            whole = whole and bool((values == np.floor(values)).all()) and bool((np.abs(values) < 2**53).all())
            floats = floats or typed
        flat = values.ndim == 1
        if whole and flat and len(numbers) <= COUNTED:
            found, counts = np.unique(values, return_counts=True)
            numbers.update(dict(zip(found.astype(np.int64).tolist(), counts.tolist(), strict=True)))
    if names:
        return Labels(Label.TEXT, classes or tuple(sorted(names)), names)
    if floats and flat and whole:
        whole = are_numbered(numbers) if as_classes is None else as_classes
    elif floats:
        # Several targets in a row keep their type where the loss takes numbers.
        whole = whole and as_classes is not False
    counted = numbers if whole and flat and len(numbers) <= COUNTED else None
    return Labels(
        Label.WHOLE if whole else Label.REAL, classes, counted, said(len(numbers)) if floats and whole and flat else None
    )
