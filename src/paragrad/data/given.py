"""Rows to evaluate or to predict, as mini-batches in order, from any data that a user gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np

from paragrad.data import load
from paragrad.data.named import are_arrays, table_of
from paragrad.data.opened import Opened
from paragrad.data.paths import are_classes
from paragrad.data.source import Source, all_rows, mapped
from paragrad.data.table import Table
from paragrad.data.transforms import Fitted


@dataclass(frozen=True)
class Given:
    """Rows in order."""

    rows: int
    batches: Callable[[int], Iterator[Any]]
    """Called with a size; returns mini-batches of at most that many rows."""
    name: str
    notes: tuple[str, ...] = ()


def given(
    data: Any,
    *,
    labelled: bool,
    transforms: Fitted | None = None,
    classes: Sequence[str] | None = None,
    columns: Mapping[str, Any] | None = None,
    keras: bool = False,
    as_classes: bool | None = None,
) -> Given:
    """Return the rows that a user gives: a table, or anything that ``train`` takes; of a file with a test part, that part.

    A table is read piece by piece, with the transformations and classes of the training, and with its ``columns`` unless the
    user names others. Other rows become a table with the ``columns`` of the training, in their order, if it had any. Labels
    are read if ``labelled``, or if the rows have them.

    Evaluation applies the training's selection of rows. Prediction does not: it predicts every row.
    """
    if columns is not None and isinstance(data, Table) and data.is_pair and data.features is None:
        data = data.source
    table = load.as_table(data)
    notes: list[str] = []
    name = None
    if table is None:
        if columns is not None and columns.get("select") is not None:
            notes.append(f"select {columns['select']!r} applies to tables only: all of these rows are used.")
        if columns is None or not are_arrays(data):
            source, name, found = load.read(data, keras=keras, as_classes=as_classes, classes=classes)
            if columns is None:
                return of_source(source, name, found)
            data, notes = source.batch(np.arange(len(source), dtype=np.int64)), [*notes, *found]
        table = table_of(data, columns, notes)
        labelled = labelled and table.label is not None
    else:
        known = {key: value for key, value in (columns or {}).items() if key != "shapes" and getattr(table, key) is None}
        if are_classes(table.source):
            known.pop("label", None)
        if not labelled and known.get("select") is not None:
            notes.append(f"select {known.pop('select')!r} of the training is not applied: every row gets a prediction.")
        table = replace(load.test_part(table) or table, **known)
    table = replace(table, transforms=() if transforms is None else tuple(step.transform for step in transforms.steps))
    opened = table.open(labelled=False, classes=classes, as_classes=as_classes)
    available = opened.files[0].columns
    if labelled or are_classes(table.source) or (table.label is not None and table.label in available):
        if table.weight is not None and table.weight not in available and not labelled:
            table = replace(table, weight=None)
        opened.close()
        opened = table.open(classes=classes, as_classes=as_classes)
    opened = replace(opened.with_fitted(transforms), scales_images=not keras)
    return _of_table(opened, name or table.name, notes)


def of_source(source: Source, name: str, notes: tuple[str, ...] = ()) -> Given:
    """Return the rows of a source."""
    return Given(len(source), lambda size: (source.batch(rows) for rows in all_rows(source, size)), name, notes)


def _of_table(opened: Opened, name: str, notes: list[str]) -> Given:
    def batches(size: int) -> Iterator[Any]:
        for piece, length in enumerate(opened.lengths):
            tree = opened.read(piece)
            for start in range(0, length, size):
                yield mapped(tree, itemgetter(slice(start, min(start + size, length))))
        opened.close()

    return Given(len(opened), batches, name, (*notes, *opened.notes))
