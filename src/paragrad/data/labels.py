"""What the labels of a table are: classes, by number or by name, or numbers to be met."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from paragrad.data.formats.file import TEXT, Array
from paragrad.errors import UsageError, unknown

if TYPE_CHECKING:
    from paragrad.data.opened import Opened


class Label(Enum):
    """What a label is."""

    FILE = "the place of the file's class"
    TEXT = "a name of a class"
    WHOLE = "a whole number"
    REAL = "any number"


def indices(values: Array, classes: Sequence[str], opened: Opened, piece: int) -> Array:
    """The numbers of the classes that a column of text names."""
    known = {name: place for place, name in enumerate(classes)}
    for row, value in enumerate(values):
        if value not in known:
            file, row = opened.place(piece, row)
            wrong = unknown("class", str(value), classes)
            raise UsageError(f"Label {opened.label!r} in row {row} of {file}: {wrong}")
    return np.array([known[value] for value in values], dtype=np.int64)


def look_at_labels(opened: Opened, classes: tuple[str, ...] | None) -> tuple[Label, tuple[str, ...] | None]:
    """What the labels are, and the names of their classes: all of them are looked at, since one alone can decide it."""
    assert opened.label is not None
    names: set[str] = set()
    whole = True
    for piece in range(len(opened.lengths)):
        if opened.fitted is None:
            values = opened.raw(piece, [opened.label])[opened.label]
        else:
            values = opened.transformed(piece)[opened.label]
        if values.dtype == TEXT:
            if "" in values:
                file, row = opened.place(piece, int(np.argmax(values == "")))
                raise UsageError(f"The label {opened.label!r} is missing in row {row} of {file}: leave such rows out.")
            if classes is not None:
                indices(values, classes, opened, piece)
            names |= set(values.tolist())
        elif values.dtype.kind == "f":
            bad = ~np.isfinite(values.reshape(len(values), -1)).all(1)
            if bad.any() and not opened.table.transforms:
                file, row = opened.place(piece, int(bad.argmax()))
                raise UsageError(f"The label {opened.label!r} is NaN or infinite in row {row} of {file}: leave such rows out.")
            whole = whole and bool((values == np.floor(values)).all()) and bool((np.abs(values) < 2**53).all())
    if names:
        return Label.TEXT, classes or tuple(sorted(names))
    return (Label.WHOLE if whole else Label.REAL), classes
