"""Rows to judge or to predict from, as mini-batches in their order: from whatever a user gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from paragrad.data import load
from paragrad.data.named import are_arrays, named
from paragrad.data.opened import Opened
from paragrad.data.paths import are_classes
from paragrad.data.source import Source, all_rows, joined, mapped
from paragrad.data.table import Table
from paragrad.data.transforms import Fitted


@dataclass(frozen=True)
class Given:
    """Rows in their order."""

    rows: int
    batches: Callable[[int], Iterator[Any]]
    """Called with a size: mini-batches of at most so many rows."""
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
    """What a user gives as rows: a table, or whatever ``train`` takes; of a file with a test part, that part.

    A table is read piece by piece, with the transformations and the classes of the training, and with its ``columns`` where the
    user says nothing of them. Other rows become a table with the ``columns`` of the training, in their order, where it had
    any. Labels are read where they are asked for, or where there are any.

    The selection of rows that the training made is made again to judge; to predict, it is not: every row is answered.
    """
    if columns is not None and isinstance(data, Table) and data.is_pair and data.features is None:
        data = data.source
    table = load.as_table(data)
    notes: list[str] = []
    name = None
    if table is None:
        if columns is None:
            source, name, said = load.read(data, keras=keras, as_classes=as_classes, classes=classes)
            return of_source(source, name, said)
        if columns.get("select") is not None:
            notes.append(f"select {columns['select']!r} is for tables: these rows are all used.")
        if not are_arrays(data):
            source, name, said = load.read(data, keras=keras, as_classes=as_classes, classes=classes)
            data, notes = joined([source.batch(rows) for rows in all_rows(source, len(source))]), [*notes, *said]
        table = named(data, columns, notes)
        labelled = labelled and table.label is not None
    else:
        known = {key: value for key, value in (columns or {}).items() if key != "shapes" and getattr(table, key) is None}
        if are_classes(table.source):
            known.pop("label", None)
        if not labelled and known.get("select") is not None:
            notes.append(f"select {known.pop('select')!r} of the training is not applied: every row gets a prediction.")
        table = replace(load.test_part(table) or table, **known)
    done = () if transforms is None else tuple(step.transform for step in transforms.steps)
    table = replace(table, transforms=done)
    bare = table.open(labelled=False, classes=classes, as_classes=as_classes)
    if labelled or are_classes(table.source) or (table.label is not None and table.label in bare.files[0].columns):
        if table.weight is not None and table.weight not in bare.files[0].columns and not labelled:
            table = replace(table, weight=None)
        bare.close()
        bare = table.open(classes=classes, as_classes=as_classes)
    return _of_table(bare.with_fitted(transforms), name or table.name, notes)


def of_source(source: Source, name: str, notes: tuple[str, ...] = ()) -> Given:
    """The rows of a source."""
    return Given(len(source), lambda size: (source.batch(rows) for rows in all_rows(source, size)), name, notes)


def _of_table(opened: Opened, name: str, notes: list[str]) -> Given:
    def batches(size: int) -> Iterator[Any]:
        for piece, length in enumerate(opened.lengths):
            tree = opened.read(piece)
            for start in range(0, length, size):
                yield mapped(tree, itemgetter(slice(start, min(start + size, length))))
        opened.close()

    return Given(len(opened), batches, name, (*notes, *opened.notes))
