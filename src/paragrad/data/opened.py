"""A table that has been looked at: rows in pieces, as columns and as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from paragrad.data import progress
from paragrad.data.formats.file import TEXT, Array, Column, File, Jagged
from paragrad.data.labels import Label, Labels, indices, look_at_labels
from paragrad.data.plan import Rows
from paragrad.data.select import Selection, selection
from paragrad.data.source import Weighted, joined
from paragrad.data.transforms import Fitted
from paragrad.errors import UsageError

if TYPE_CHECKING:
    from paragrad.data.table import Table

Chosen: TypeAlias = Rows | Callable[[int], Rows] | None
"""Some rows, in rising order, or a function that says which of a piece; None: all."""
KEPT_OPEN = 16
"""Files that are open at a time."""


class Shelf:
    """Which files are open: a few, those used last; one is read at a time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._open: list[File] = []

    def used(self, file: File) -> None:
        """This one was read; the one not read for longest may have to go."""
        self._open = [other for other in self._open if other is not file] + [file]
        if len(self._open) > KEPT_OPEN:
            self._open.pop(0).close()

    def __reduce__(self) -> tuple[type[Shelf], tuple[()]]:
        return type(self), ()


@dataclass(frozen=True)
class Opened:
    """Files with their columns; picklable, and opened anew in every process."""

    table: Table
    files: tuple[File, ...]
    columns: Mapping[str, Column]
    """Those that are used, with lists as long as they are padded."""
    features: tuple[str, ...]
    label: str | None
    weight: str | None
    origins: tuple[int, ...]
    """The place of each file's class."""
    notes: tuple[str, ...] = ()
    kind: Label | None = None
    """What labels are; None: rows without labels."""
    classes: tuple[str, ...] | None = None
    """The names of the classes, where they have any."""
    counts: Mapping[Any, int] | None = None
    """Rows of each class, by name or number; None where labels are no classes."""
    as_classes: bool | None = None
    """Whether floats that are whole are numbers of classes; None: where they look it."""
    selected: tuple[int, ...] | None = None
    """Rows of each piece that the table's selection leaves; None: all."""
    narrow: frozenset[str] = frozenset()
    """Columns of float64 that are read as float32, which holds all of their digits."""
    fitted: Fitted | None = None
    scale: float = 1.0
    """What weights are multiplied with."""
    _shelf: Shelf = field(default_factory=Shelf, repr=False, compare=False)

    def with_fitted(self, fitted: Fitted | None) -> Opened:
        """The same with its transformations fitted."""
        changed = replace(self, fitted=fitted)
        if fitted is None or self.label is None or self.kind is None:
            return changed
        before, after = self.raw(self.first)[self.label], changed.transformed(self.first).get(self.label)
        if after is None:
            raise UsageError(f"A transformation takes the label {self.label!r} away: leave the label out of it.")
        if before.dtype == after.dtype and np.array_equal(before, after):
            return changed
        return changed.with_labels(look_at_labels(changed, None, self.as_classes))

    def with_labels(self, found: Labels) -> Opened:
        """The same, now that its labels have been looked at."""
        notes = self.notes if found.note is None else (*self.notes, found.note)
        return replace(self, kind=found.kind, classes=found.classes or self.classes, counts=found.counts, notes=notes)

    def with_selection(self) -> Opened:
        """The same, with the rows counted that the table's selection leaves."""
        if self.selection is None:
            return self
        counts: list[int] = []
        total = sum(length for file in self.files for length in file.lengths)
        for piece in range(sum(len(file.lengths) for file in self.files)):
            counts.append(int(self._mask(piece).sum()))
            progress.tell(f"selecting rows of {self.table.name}", sum(self._whole[: piece + 1]), total)
        if not any(counts):
            raise UsageError(f"select {self.selection.text!r} leaves none of the {total:,} rows of {self.table.name}.")
        note = f"select {self.selection.text!r} leaves {sum(counts):,} of {total:,} rows."
        return replace(self, selected=tuple(counts), notes=(*self.notes, note))

    def with_scale(self, scale: float) -> Opened:
        """The same with weights multiplied."""
        return replace(self, scale=scale)

    # -- what there is --------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the features, in the order in which the model sees them."""
        if self.fitted is None:
            return self.features
        return tuple(name for name in self.transformed(self.first) if name not in (self.label, self.weight))

    @property
    def roles(self) -> dict[str, Any]:
        """Which columns are features, with the shape of a value of each, label and weight; as JSON has it."""
        shapes = [list(self.columns[name].shape) for name in self.features]
        return {"features": list(self.features), "shapes": shapes, "label": self.label, "weight": self.weight}

    @property
    def first(self) -> int:
        """The first piece that has rows."""
        return next(piece for piece, length in enumerate(self.lengths) if length)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each piece, over all files."""
        return self._whole if self.selected is None else self.selected

    @cached_property
    def _whole(self) -> tuple[int, ...]:
        """Rows of each piece as it is stored."""
        return tuple(length for file in self.files for length in file.lengths)

    @property
    def selection(self) -> Selection | None:
        """Which rows are used."""
        return None if self.table.select is None else selection(self.table.select)

    @property
    def row_bytes(self) -> int:
        """What a row takes as tensors, before transformations."""
        values = sum(int(np.prod(self.columns[name].shape, dtype=np.int64)) for name in self.features)
        return 4 * values + 8 * (self.kind is not None) + 4 * (self.weight is not None)

    @property
    def fed(self) -> tuple[str, ...]:
        """The columns that the transformations see: the features, and the label where one of them names it."""
        named = [one for one in self.table.transforms if self.label in getattr(one, "columns", ())]
        return (*self.features, *([self.label] if self.label is not None and named else []))

    def __len__(self) -> int:
        return sum(self.lengths)

    def name(self, piece: int) -> str:
        """The file that a piece lies in."""
        return self.files[self._where(piece)[0]].name

    # -- reading --------------------------------------------------------------------------------------------

    def raw(self, piece: int, names: Sequence[str] | None = None) -> dict[str, Array]:
        """Columns of a piece as they are stored; lists padded."""
        used = tuple(self.columns) if names is None else tuple(names)
        if self.selection is None:
            stored = self._stored(piece, used)
        else:
            stored = self._stored(piece, tuple(dict.fromkeys((*used, *self.selection.names))))
            mask = self.selection.mask(stored, self.name(piece))
            stored = {
                name: stored[name].where(mask) if isinstance(stored[name], Jagged) else stored[name][mask] for name in used
            }
        return {
            name: values.padded(self.columns[name].shape[0]) if isinstance(values, Jagged) else values
            for name, values in stored.items()
        }

    def _stored(self, piece: int, names: Sequence[str]) -> dict[str, Any]:
        """Columns of a piece with all of its rows, as the file has them."""
        place, inner, _ = self._where(piece)
        file = self.files[place]
        with self._shelf.lock:
            stored = file.read(inner, names)
            self._shelf.used(file)
        return {**stored, **{name: np.asarray(stored[name], np.float32) for name in self.narrow.intersection(stored)}}

    def _mask(self, piece: int) -> Array:
        """Which rows of a piece are selected."""
        assert self.selection is not None
        return self.selection.mask(self._stored(piece, self.selection.names), self.name(piece))

    def transformed(self, piece: int) -> dict[str, Array]:
        """Columns of a piece after the transformations."""
        columns = self.raw(piece)
        if self.fitted is None:
            return columns
        changed = self.fitted.apply({name: columns.pop(name) for name in self.fed}, self.name(piece))
        return {**changed, **columns}

    def read(self, piece: int) -> Any:
        """The rows of a piece as tensors: (x, y), x alone where there is no label, or either with weights."""
        columns = self.transformed(piece)
        x: Any = torch.from_numpy(self._inputs(columns, piece))
        tree = x if self.kind is None else (x, torch.from_numpy(self._targets(columns, piece)))
        if self.weight is None:
            return tree
        weight = self._weights(columns[self.weight], piece) * np.float32(self.scale)
        return Weighted(tree, torch.from_numpy(weight))

    def load(self) -> Any:
        """All rows."""
        trees, done = [], 0
        for piece, length in enumerate(self.lengths):
            if length:
                trees.append(self.read(piece))
                done += length
                progress.tell(f"reading {self.table.name}", done, len(self))
        self.close()
        return joined(trees)

    def chosen(self, rows: Chosen) -> Iterator[dict[str, Array]]:
        """What transformations are fitted on: the columns they see, piece by piece, of some rows (in rising order) or all."""
        done = 0
        for piece, mine in self._parts(rows):
            yield {name: values[mine] for name, values in self.raw(piece, self.fed).items()}
            done += self.lengths[piece]
            progress.tell(f"fitting transformations on {self.table.name}", done, len(self))

    def mean_weight(self, rows: Chosen) -> float:
        """The mean of the weights' absolute values, over some rows (in rising order) or all."""
        assert self.weight is not None
        total, count = 0.0, 0
        for piece, mine in self._parts(rows):
            found = self._weights(self.raw(piece, [self.weight])[self.weight], piece)[mine]
            total += float(np.abs(found, dtype=np.float64).sum())
            count += len(found)
        return total / count

    def close(self) -> None:
        """Let go of the files; they are opened again when they are read."""
        for file in self.files:
            file.close()

    def place(self, piece: int, row: int) -> tuple[str, int]:
        """The file that a row of a piece lies in, and its number there."""
        file, inner, _ = self._where(piece)
        if self.selection is not None:
            row = int(np.flatnonzero(self._mask(piece))[row])
        return self.files[file].name, sum(self.files[file].lengths[:inner]) + row

    # -- the parts of a row ---------------------------------------------------------------------------------

    def _where(self, piece: int) -> tuple[int, int, int]:
        """A piece as a file, a piece of that file, and the place of its class."""
        for place, file in enumerate(self.files):
            if piece < len(file.lengths):
                return place, piece, self.origins[place]
            piece -= len(file.lengths)
        raise IndexError(piece)

    def _parts(self, rows: Chosen) -> Iterator[tuple[int, Any]]:
        """Every piece, and which of its rows are meant."""
        start = 0
        for piece, length in enumerate(self.lengths):
            if not length:
                continue
            if rows is None:
                yield piece, slice(None)
            elif callable(rows):
                yield piece, rows(piece)
            else:
                yield piece, rows[np.searchsorted(rows, start) : np.searchsorted(rows, start + length)] - start
            start += length

    def _inputs(self, columns: dict[str, Array], piece: int) -> Array:
        names = [name for name in columns if name not in (self.label, self.weight)]
        if len(names) == 1 and columns[names[0]].ndim > 2:
            values = columns[names[0]]
            found = self._numbers(values, names[0], piece)
            return found / np.float32(255) if values.dtype == np.uint8 else found
        parts = [self._numbers(columns[name], name, piece) for name in names]
        for name, part in zip(names, parts, strict=True):
            if part.ndim > 2:
                raise UsageError(
                    f"The feature {name!r} is of shape {part.shape[1:]} in each row: give it alone, or reshape it to a line."
                )
        if len(parts) == 1 and parts[0].ndim == 2:
            return parts[0]
        return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)

    def _numbers(self, values: Array, name: str, piece: int) -> Array:
        """A column as float32, if all of it is finite."""
        if values.dtype == TEXT:
            file, row = self.place(piece, 0)
            raise UsageError(
                f"Column {name!r} of {file} holds text ({values[0]!r} in row {row}), but numbers are due. Leave it out "
                "(features=, --features), or turn it into numbers by a transformation."
            )
        with np.errstate(over="ignore"):  # what is too large for float32 is infinite then, and said below
            found = np.require(values, np.float32, ["C", "W"])
        if not np.isfinite(found).all():
            bad = ~np.isfinite(found.reshape(len(found), -1)).all(axis=1, keepdims=True)
            file, row = self.place(piece, int(bad.argmax()))
            count = int(bad.sum())
            others = f" and in {count - 1:,} more of the {len(found):,} rows that were read with it" * (count > 1)
            raise UsageError(
                f"Column {name!r} of {file} has NaN or infinity in row {row}{others}. Leave such rows out (select=, --select "
                f"'{name} == {name}' drops NaN), or put a number there (--transform missing, pg.Missing())."
            )
        return found

    def _weights(self, values: Array, piece: int) -> Array:
        assert self.weight is not None
        found = self._numbers(values, self.weight, piece)
        if found.ndim != 1:
            raise UsageError(f"The weight {self.weight!r} is of shape {found.shape[1:]} in each row, but it is one number.")
        return found

    def _targets(self, columns: dict[str, Array], piece: int) -> Array:
        if self.kind is Label.FILE:
            return np.full(len(next(iter(columns.values()))), self._where(piece)[2], dtype=np.int64)
        assert self.label is not None
        values = columns[self.label]
        if self.kind is Label.TEXT:
            assert self.classes is not None
            return indices(values, self.classes, self, piece)
        return values.astype(np.int64) if self.kind is Label.WHOLE else self._numbers(values, self.label, piece)
