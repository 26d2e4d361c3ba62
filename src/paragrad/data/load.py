"""From what a user gives (a name, a file, arrays, a Dataset) to a source to train on and one to validate on."""

from __future__ import annotations

import glob
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paragrad.data import archive, builtin, memory, transforms, weights
from paragrad.data.formats.frame import is_frame
from paragrad.data.generated import Generated
from paragrad.data.opened import Chosen, Opened
from paragrad.data.paths import are_classes, are_paths
from paragrad.data.plan import Rows
from paragrad.data.source import Arrays, Items, Source, Weighted, joined, leaves, target_of
from paragrad.data.stream import Part, Pieces, Streamed
from paragrad.data.table import Table
from paragrad.data.trees import as_tree, checked, named
from paragrad.errors import UsageError, unknown

Data: TypeAlias = Any
"""A name, files (a path, a glob, a directory, a list of those), a Table, arrays or tensors (nested in tuples, lists, dicts), a
frame, a map-style Dataset, or a source."""

CATALOGUE: dict[str, str] = {
    "digits": "1,797 handwritten digits of 8x8 pixels, 10 classes (scikit-learn's own copy; no test part)",
    "noise": "rows of standard normal noise, which toy problems are trained on (see: paragrad models); noise:rows=1000",
    "FILE.npz": "a NumPy archive with x_train and y_train, and x_test and y_test if there is a test part",
    "FILE": "a table: .csv, .parquet, .h5, .root, .npy, .npz (its columns: paragrad data FILE); a glob or a directory of them",
    "CLASS=FILE": "the rows of one class; give --data for each",
}
"""What ``data`` may be on the command line, each in a line."""

IGNORED = -100
"""torch's own mark for a target that does not count."""
SAMPLE = 1_000
"""Rows that a fingerprint looks at."""


@dataclass(frozen=True)
class Split:
    """What to train on and what to validate on."""

    train: Source
    validation: Source | None
    name: str
    notes: tuple[str, ...]
    """What was done to the data without being asked, to be said aloud."""
    opened: Opened | None = None
    """The table that the rows to train on are from, with its transformations fitted."""


@dataclass(frozen=True)
class _Given:
    """One thing the user gave, read."""

    source: Arrays | Items | Streamed | Generated
    test: Arrays | None
    name: str
    notes: tuple[str, ...] = ()


def split(
    data: Data,
    validation: Data = None,
    holdout: float | None = None,
    seed: int = 0,
    *,
    width: int | None = None,
    scaled: bool = True,
) -> Split:
    """Sources to train and to validate on.

    Arrays are taken as they are, but float64 NumPy arrays become float32 (torch tensors keep their type) and integer
    targets int64. The target is the last of a tuple. Images of bytes in a file become float32 from 0 to 1.

    ``validation`` may be whatever ``data`` may be; of a file with a test part, that part is taken. Without it, the
    test part of the data is used, or ``holdout``, a share of the rows drawn by ``seed``; without either, none.

    ``"noise"`` is drawn by ``seed``, in rows of ``width`` numbers; its test part is a row of zeros. Weights of rows are
    scaled to a mean of 1, or left as they are (``scaled=False``).
    """
    if isinstance(data, Split):
        return data
    if holdout is not None and not 0 <= holdout < 1:
        raise UsageError(f"holdout={holdout}, but it is a share of the rows: above 0 and below 1, or 0 for none.")
    if validation is not None and holdout:
        raise UsageError(f"validation= and holdout={holdout} are both given, but rows to validate on come from one of them.")
    table = as_table(data)
    if table is not None:
        return _split_table(table, validation, holdout, seed, scaled=scaled)
    given = _read(data, "data", seed, width)
    if validation is not None:
        other = _read(validation, "validation", seed, width)
        test = other.test or other.source
        test = test.all() if isinstance(test, Generated) else test
        _check_alike(given.source, test)
        return _scaled(Split(given.source, test, given.name, given.notes), scaled)
    if given.test is not None and not holdout:
        return Split(given.source, given.test, given.name, given.notes)
    if not holdout:
        return _scaled(Split(given.source, None, given.name, given.notes), scaled)
    if isinstance(given.source, Generated):
        raise UsageError(
            f"holdout={holdout}, but {given.source.what} gives each row once: give rows to validate on as validation=, which "
            "may be another pg.Generated."
        )
    if isinstance(given.source, Streamed):
        note = _said(holdout, _count_held(len(given.source), holdout), len(given.source), seed)
        train, kept = given.source.hold_out(holdout, seed)
        return Split(train, _at_hand(kept), given.name, (*given.notes, note))
    held, rest = _held(len(given.source), holdout, seed)
    note = _said(holdout, len(held), len(given.source), seed)
    if given.test is not None:
        note = f"{note.replace('No test part', 'Holdout')} The test part of {given.name} is not used."
    parts = Split(given.source.select(rest), given.source.select(held), given.name, (*given.notes, note))
    return _scaled(parts, scaled)


def read(data: Data) -> tuple[Source, str, tuple[str, ...]]:
    """Rows that are no table, with their name and what is to be said of them; of a file with a test part, that part."""
    given = _read(data, "data", 0, None)
    return given.test or given.source, given.name, given.notes


def check_labels(source: Source, outputs: int) -> None:
    """Raise where a class label has no output of its own in the model."""
    if not isinstance(source, Arrays):
        return
    labels = leaves(target_of(source.tree))[-1]
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        return
    wrong = ((labels < 0) | (labels >= outputs)) & (labels != IGNORED)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise UsageError(
            f"The label in row {row} is {int(labels[row])}, but the model has {outputs} outputs, so labels are 0 to "
            f"{outputs - 1}. Number the classes from 0, or give the model more outputs."
        )


def fingerprint(source: Source) -> str:
    """A short text that changes with the data: shapes, types, and a hash of up to 1,000 rows."""
    if isinstance(source, Streamed | Generated):
        return source.fingerprint()
    if not isinstance(source, Arrays):
        inner = source.dataset if isinstance(source, Items) else source
        return f"{type(inner).__name__}-{len(source)}"
    rows = torch.from_numpy(np.linspace(0, len(source) - 1, min(len(source), SAMPLE)).round().astype(np.int64))
    found = hashlib.sha256()
    for where, leaf in named(source.tree, ""):
        found.update(f"{where} {tuple(leaf.shape)} {leaf.dtype};".encode())
        sample = leaf.index_select(0, rows).contiguous()
        found.update(sample.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


# -- reading ----------------------------------------------------------------------------------------------------


def _read(data: Data, what: str, seed: int, width: int | None) -> _Given:
    table = as_table(data)
    if table is not None:
        if table.transforms:
            raise UsageError(
                f"The table given as {what} has transformations, which are fitted on the rows to train on: give a Table there."
            )
        opened = table.open()
        return _Given(Arrays(opened.load()), None, table.name, opened.notes)
    if isinstance(data, Arrays | Items):
        source = checked(as_tree(data.tree, what), what) if isinstance(data, Arrays) else _items(data, what)
        return _Given(source, None, "arrays" if isinstance(data, Arrays) else type(data.dataset).__name__)
    if isinstance(data, str) and data.partition(":")[0].strip().lower() == "noise":
        source, test = builtin.noise(data, what, seed, width)
        return _Given(source, test, data)
    if isinstance(data, str | Path):
        return _Given(builtin.digits(), None, "digits") if data == "digits" else _file(data)
    if isinstance(data, Streamed):
        return _Given(data, None, type(data.pieces).__name__)
    if isinstance(data, Pieces):
        return _Given(Streamed(data), None, type(data).__name__)
    if isinstance(data, Generated | DataLoader | IterableDataset):
        generated = data if isinstance(data, Generated) else Generated(data)
        return _Given(generated, None, generated.what, (f"{generated.what} is read by one process and not shuffled.",))
    if isinstance(data, Iterator) or inspect.isgeneratorfunction(data):
        raise UsageError(
            f"{what} is a generator, which does not say how many rows make an epoch: give pg.Generated(make, rows=...) or "
            "pg.Generated(make, steps=...), where make is the function that returns it."
        )
    if isinstance(data, TensorDataset):
        tree = as_tree(data.tensors if len(data.tensors) > 1 else data.tensors[0], what)
        return _Given(checked(tree, what), None, "TensorDataset")
    if isinstance(data, tuple | list | dict | torch.Tensor | Weighted) or hasattr(data, "__array__"):
        return _Given(checked(as_tree(data, what), what), None, "arrays")
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, bytes):
        return _Given(_items(Items(data), what), None, type(data).__name__)
    raise UsageError(
        f"{what} is a {type(data).__name__}, but rows come from a name ({', '.join(CATALOGUE)}), paths of files, a "
        "frame, NumPy arrays or torch tensors (in a tuple, list or dict), or a Dataset with __len__ and __getitem__."
    )


def _file(path: str | Path) -> _Given:
    file = Path(path).expanduser()
    if isinstance(path, str) and not file.suffix and "/" not in path and not file.exists():
        raise unknown("data set", path, CATALOGUE)
    found = archive.read(file)
    notes: list[str] = []
    parts = {
        part: archive.part_of(found, part, file, notes) for part in ("train", "test") if part == "train" or f"x_{part}" in found
    }
    if "y_test" in found and "test" not in parts:
        raise UsageError(f"{file} has y_test but no x_test. Add x_test, or leave both out.")
    if "test" in parts:
        _check_alike(parts["train"], parts["test"])
    return _Given(parts["train"], parts.get("test"), file.name, tuple(dict.fromkeys(notes)))


def _items(items: Items, what: str) -> Items:
    if not len(items):
        raise UsageError(f"{what} ({type(items.dataset).__name__}) has no rows.")
    return items


# -- tables -----------------------------------------------------------------------------------------------------


def as_table(data: Data) -> Table | None:
    """What was given as a table, where it is one: files, a frame."""
    if isinstance(data, Table):
        return data
    if is_frame(data) or are_classes(data) or (isinstance(data, list | tuple) and are_paths(data)):
        return Table(data)
    if isinstance(data, str | Path):
        path = Path(data).expanduser()
        if path.is_dir() or glob.has_magic(str(data)) or path.suffix.lower() not in ("", ".npz"):
            return Table(data)
    return None


def _split_table(table: Table, validation: Data, holdout: float | None, seed: int, *, scaled: bool) -> Split:
    opened = table.open()
    streamed = _streams(table, opened)
    held, rest = _held_rows(opened, holdout, seed, streamed=streamed) if holdout else (None, None)
    if table.transforms:
        apart = [name for name in (opened.label, opened.weight) if name is not None]
        opened = opened.with_fitted(transforms.fit(table.transforms, lambda: opened.chosen(rest), apart=apart))
    notes = [*opened.notes, *getattr(opened.fitted, "notes", ())]
    if opened.weight is not None and scaled:
        opened = opened.with_scale(weights.factor(opened.mean_weight(rest), notes))
    test: Source | None = None
    if validation is not None:
        test = _like(opened, validation, notes)
    if holdout:
        notes.append(_said(holdout, _count_held(len(opened), holdout), len(opened), seed))
    source: Source
    if streamed:
        notes.append(f"The {len(opened):,} rows of {table.name} are read while training (stream).")
        source = Streamed(opened)
        if holdout:
            source, test = source.hold_out(holdout, seed)
    else:
        source = whole = Arrays(opened.load())
        if isinstance(rest, np.ndarray) and isinstance(held, np.ndarray):
            source, test = whole.select(rest), whole.select(held)
    if test is not None:
        test = _at_hand(test)
        _check_alike(source, test)
    return Split(source, test, table.name, tuple(notes), opened)


def _held_rows(opened: Opened, share: float, seed: int, *, streamed: bool) -> tuple[Chosen, Chosen]:
    """The rows that are held out, and the others; of those that are streamed, so many of each piece."""
    if not streamed:
        return _held(len(opened), share, seed)
    lengths = np.asarray(opened.lengths, dtype=np.int64)

    def chosen(held: bool) -> Callable[[int], Rows]:
        part = Part(share, seed, held)
        counts = part.counts(lengths)
        return lambda piece: part.rows(piece, int(lengths[piece]), int(counts[piece]))

    return chosen(True), chosen(False)


def _at_hand(source: Source) -> Source:
    """Rows to validate on are looked at again and again: they are loaded, where an eighth of the free memory holds them."""
    if not isinstance(source, Streamed) or len(source) * source.row_bytes > memory.available() / 8:
        return source
    trees = [source.load(piece) for piece in range(len(source.lengths)) if source.lengths[piece]]
    return Arrays(joined(trees))


def _like(opened: Opened, validation: Data, notes: list[str]) -> Source:
    """Rows to validate on: files are read as those to train on are."""
    table = as_table(validation)
    if table is None:
        if opened.fitted is not None:
            raise UsageError(
                "validation is given as arrays, but the rows to train on go through transformations of columns by name: give "
                "files, a frame or a Table with the same columns."
            )
        given = _read(validation, "validation", 0, None)
        return weights.times(given.test or given.source, opened.scale)
    mine = opened.table
    if isinstance(validation, Table):
        table = replace(table, transforms=mine.transforms)
    else:
        label = None if are_classes(table.source) else opened.label
        table = replace(mine, source=table.source, features=opened.features, label=label)
    other = table.open(classes=opened.classes)
    notes += other.notes
    other = other.with_fitted(opened.fitted).with_scale(opened.scale)
    return Streamed(other) if _streams(table, other) else Arrays(other.load())


def _streams(table: Table, opened: Opened) -> bool:
    """Whether rows are read while training: where that was asked for, or where they would fill half of the free memory."""
    if table.stream is not None:
        return table.stream
    return len(opened) * opened.row_bytes > memory.available() / 2


# -- parts ------------------------------------------------------------------------------------------------------


def _scaled(parts: Split, scaled: bool) -> Split:
    if not scaled:
        return parts
    notes = list(parts.notes)
    train, validation = weights.scaled(parts.train, parts.validation, notes)
    return replace(parts, train=train, validation=validation, notes=tuple(notes))


def _check_alike(train: Source, validation: Source) -> None:
    if not (isinstance(train, Arrays) and isinstance(validation, Arrays)):
        return
    # Either may have weights without the other.
    trees = [source.tree.rows if isinstance(source.tree, Weighted) else source.tree for source in (train, validation)]
    shapes = [[tuple(leaf.shape[1:]) for leaf in leaves(tree)] for tree in trees]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"A row to train on has the shapes {shapes[0]}, but one to validate on {shapes[1]}. Give both the same "
            "arrays in one order."
        )


def _held(total: int, share: float, seed: int) -> tuple[Rows, Rows]:
    """The rows that are held out, and the others."""
    count = _count_held(total, share)
    order = np.random.default_rng((seed, 2)).permutation(total)
    return np.sort(order[:count]), np.sort(order[count:])


def _count_held(total: int, share: float) -> int:
    count = math.ceil(share * total - 1e-9)
    if not 0 < count < total:
        raise UsageError(f"holdout={share} of {total:,} rows is {count:,}: at least 1 must be held out and 1 left to train on.")
    return count


def _said(share: float, count: int, total: int, seed: int) -> str:
    return (
        f"No test part: {100 * share:.4g} % of the rows ({count:,} of {total:,}, by seed {seed}) are held out for validation."
    )
