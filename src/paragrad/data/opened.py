"""An opened table: its rows in pieces, as columns and as tensors."""

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
from paragrad.data.labels import Label, indices, with_labels
from paragrad.data.plan import Rows
from paragrad.data.select import Selection, selection
from paragrad.data.source import Weighted, joined
from paragrad.data.transforms import Fitted
from paragrad.errors import UsageError

if TYPE_CHECKING:
    from paragrad.data.table import Table

Chosen: TypeAlias = Rows | Callable[[int], Rows] | None
"""Some rows in ascending order, or a function that returns the rows of a piece; None: all rows."""
KEPT_OPEN = 16
"""Largest number of files that are open at a time."""


class OpenFiles:
    """The files that were read last and stay open. The lock lets one thread read at a time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._files: list[File] = []

    def used(self, file: File) -> None:
        """Note that a file was read. Close the least recently used one if too many are open."""
        self._files = [other for other in self._files if other is not file] + [file]
        if len(self._files) > KEPT_OPEN:
            self._files.pop(0).close()

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return type(self), ()


@dataclass(frozen=True)
class Opened:
    """Files with their columns. It can be pickled, and every process opens the files itself."""

    table: Table
    files: tuple[File, ...]
    columns: Mapping[str, Column]
    """The columns that are used; lists have their padded length."""
    features: tuple[str, ...]
    label: str | None
    weight: str | None
    origins: tuple[int, ...]
    """Class number of each file."""
    notes: tuple[str, ...] = ()
    kind: Label | None = None
    """Kind of the labels; None: rows without labels."""
    classes: tuple[str, ...] | None = None
    """Names of the classes, if they have names."""
    counts: Mapping[Any, int] | None = None
    """Rows per class, by name or number; None if labels are not classes."""
    as_classes: bool | None = None
    """True if whole floats are class numbers; None: only if they are exactly 0, 1, ..., K - 1."""
    selected: tuple[int, ...] | None = None
    """Rows of each piece that the table's selection keeps; None: all."""
    narrow: frozenset[str] = frozenset()
    """Columns of float64 that are read as float32, because float32 holds all of their digits."""
    fitted: Fitted | None = None
    scale: float = 1.0
    """Factor by which weights are multiplied."""
    scales_images: bool = True
    """True if images of bytes are scaled to 0 to 1. Keras models scale them by their own layers."""
    _open_files: OpenFiles = field(default_factory=OpenFiles, repr=False, compare=False)

    def with_fitted(self, fitted: Fitted | None) -> Opened:
        """Return the same table with fitted transformations."""
        changed = replace(self, fitted=fitted)
        if fitted is None or self.label is None or self.kind is None:
            return changed
        before, after = self.raw(self.first)[self.label], changed.transformed(self.first).get(self.label)
        if after is None:
            raise UsageError(f"A transformation removes the label {self.label!r}: exclude the label from it.")
        if before.dtype == after.dtype and np.array_equal(before, after):
            return changed
        return with_labels(changed, None, self.as_classes)

    def with_selection(self) -> Opened:
        """Return the same table with a count of the rows that the table's selection keeps."""
        if self.selection is None:
            return self
        counts: list[int] = []
        total = sum(self._whole)
        for piece in range(len(self._whole)):
            counts.append(int(self._mask(piece).sum()))
            progress.report(f"selecting rows of {self.table.name}", sum(self._whole[: piece + 1]), total)
        if not any(counts):
            raise UsageError(f"select {self.selection.text!r} leaves none of the {total:,} rows of {self.table.name}.")
        note = f"select {self.selection.text!r} leaves {sum(counts):,} of {total:,} rows."
        return replace(self, selected=tuple(counts), notes=(*self.notes, note))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the features, in the order in which the model gets them."""
        if self.fitted is None:
            return self.features
        return tuple(name for name in self.transformed(self.first) if name not in (self.label, self.weight))

    @property
    def roles(self) -> dict[str, Any]:
        """Features with the shape of one value of each, label and weight, as JSON values."""
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
        """Rows of each piece before the selection."""
        return tuple(length for file in self.files for length in file.lengths)

    @property
    def selection(self) -> Selection | None:
        """The expression that selects rows."""
        return None if self.table.select is None else selection(self.table.select)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as tensors, before transformations."""
        values = sum(int(np.prod(self.columns[name].shape, dtype=np.int64)) for name in self.features)
        return 4 * values + 8 * (self.kind is not None) + 4 * (self.weight is not None)

    @property
    def transform_inputs(self) -> tuple[str, ...]:
        """Columns that the transformations get: the features, and the label if one of them names it."""
        named = any(self.label in getattr(one, "columns", ()) for one in self.table.transforms)
        return (*self.features, self.label) if self.label is not None and named else self.features

    def __len__(self) -> int:
        return sum(self.lengths)

    def name(self, piece: int) -> str:
        """Return the name of the file that contains a piece."""
        return self.files[self._places[piece][0]].name

    def raw(self, piece: int, names: Sequence[str] | None = None) -> dict[str, Array]:
        """Return columns of a piece before transformations, with padded lists."""
        used = tuple(self.columns) if names is None else tuple(names)
        if self.selection is None:
            stored = self._stored(piece, used)
        else:
            stored = self._stored(piece, tuple(dict.fromkeys((*used, *self.selection.names))))
            mask = self.selection.mask(stored, self.name(piece))
            stored = {name: stored[name][mask] for name in used}
        return {
            name: values.padded(self.columns[name].shape[0]) if isinstance(values, Jagged) else values
            for name, values in stored.items()
        }

    def _stored(self, piece: int, names: Sequence[str]) -> dict[str, Any]:
        """Return columns of all rows of a piece, as the file stores them."""
        place, inner = self._places[piece]
        file = self.files[place]
        with self._open_files.lock:
            stored = file.read(inner, names)
            self._open_files.used(file)
        return {**stored, **{name: np.asarray(stored[name], np.float32) for name in self.narrow.intersection(stored)}}

    def _mask(self, piece: int) -> Array:
        assert self.selection is not None
        return self.selection.mask(self._stored(piece, self.selection.names), self.name(piece))

    def transformed(self, piece: int) -> dict[str, Array]:
        """Return the columns of a piece after the transformations."""
        columns = self.raw(piece)
        if self.fitted is None:
            return columns
        changed = self.fitted.apply({name: columns.pop(name) for name in self.transform_inputs}, self.name(piece))
        return {**changed, **columns}

    def read(self, piece: int) -> Any:
        """Return the rows of a piece as tensors: (x, y), x alone without a label, or either with weights."""
        columns = self.transformed(piece)
        x: Any = torch.from_numpy(self._inputs(columns, piece))
        tree = x if self.kind is None else (x, torch.from_numpy(self._targets(columns, piece)))
        if self.weight is None:
            return tree
        weight = self._weights(columns[self.weight], piece) * np.float32(self.scale)
        return Weighted(tree, torch.from_numpy(weight))

    def load(self) -> Any:
        """Return all rows as tensors."""
        trees, done = [], 0
        for piece, length in enumerate(self.lengths):
            if length:
                trees.append(self.read(piece))
                done += length
                progress.report(f"reading {self.table.name}", done, len(self))
        self.close()
        return joined(trees)

    def chosen(self, rows: Chosen) -> Iterator[dict[str, Array]]:
        """Yield the columns that transformations are fitted on, piece by piece, for the chosen rows."""
        done = 0
        for piece, mine in self._parts(rows):
            yield {name: values[mine] for name, values in self.raw(piece, self.transform_inputs).items()}
            done += self.lengths[piece]
            progress.report(f"fitting transformations on {self.table.name}", done, len(self))

    def mean_weight(self, rows: Chosen) -> float:
        """Return the mean absolute weight of the chosen rows."""
        assert self.weight is not None
        total, count = 0.0, 0
        for piece, mine in self._parts(rows):
            found = self._weights(self.raw(piece, [self.weight])[self.weight], piece)[mine]
            total += float(np.abs(found, dtype=np.float64).sum())
            count += len(found)
        return total / count

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        for file in self.files:
            file.close()

    def locate(self, piece: int, row: int) -> tuple[str, int]:
        """Return the file of a row of a piece, and the number of the row in that file."""
        place, inner = self._places[piece]
        if self.selection is not None:
            row = int(np.flatnonzero(self._mask(piece))[row])
        return self.files[place].name, sum(self.files[place].lengths[:inner]) + row

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        """For every piece, the place of its file, and the number of the piece in that file."""
        return tuple((place, inner) for place, file in enumerate(self.files) for inner in range(len(file.lengths)))

    def _parts(self, rows: Chosen) -> Iterator[tuple[int, Any]]:
        """Yield every piece that has rows, with an index of its chosen rows."""
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
        parts = [self._numbers(columns[name], name, piece) for name in names]
        if len(parts) == 1 and parts[0].ndim > 2:
            is_image = self.scales_images and columns[names[0]].dtype == np.uint8
            return parts[0] / np.float32(255) if is_image else parts[0]
        for name, part in zip(names, parts, strict=True):
            if part.ndim > 2:
                raise UsageError(
                    f"The feature {name!r} has the shape {part.shape[1:]} in each row: use it as the only feature, or reshape "
                    "it to one dimension."
                )
        if len(parts) == 1 and parts[0].ndim == 2:
            return parts[0]
        return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)

    def _numbers(self, values: Array, name: str, piece: int) -> Array:
        """Return a column as float32. Raise if it holds text, NaN or infinity."""
        if values.dtype == TEXT:
            raise text_error(name, values[0], *self.locate(piece, 0))
        with np.errstate(over="ignore"):  # too large for float32 becomes infinity, which is refused below
            found = np.require(values, np.float32, ["C", "W"])
        if not np.isfinite(found).all():
            bad = ~np.isfinite(found.reshape(len(found), -1)).all(axis=1, keepdims=True)
            file, row = self.locate(piece, int(bad.argmax()))
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
            raise UsageError(
                f"The weight {self.weight!r} has the shape {found.shape[1:]} in each row, but it must be one number."
            )
        return found

    def _targets(self, columns: dict[str, Array], piece: int) -> Array:
        if self.kind is Label.FILE:
            return np.full(len(next(iter(columns.values()))), self.origins[self._places[piece][0]], dtype=np.int64)
        assert self.label is not None
        values = columns[self.label]
        if self.kind is Label.TEXT:
            assert self.classes is not None
            return indices(values, self.classes, self, piece)
        return values.astype(np.int64) if self.kind is Label.WHOLE else self._numbers(values, self.label, piece)


def text_error(column: str, value: Any, file: str, row: int) -> UsageError:
    """Return the error for text in a column that must hold numbers."""
    return UsageError(
        f"Column {column!r} of {file} holds text ({value!r} in row {row}), but the model needs numbers. Leave it out "
        "(features=, --features), or convert it to numbers by a transformation."
    )
