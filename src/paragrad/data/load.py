"""From what a user gives (a name, a file, arrays, a Dataset) to a source to train on and one to validate on."""

from __future__ import annotations

import glob
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paragrad.data import archive, builtin, memory, overview, transforms, weights
from paragrad.data.formats.frame import is_frame
from paragrad.data.formats.numpy import PARTS, has_columns, parts_of
from paragrad.data.generated import Generated
from paragrad.data.labels import Label, Meaning
from paragrad.data.loaders import of_loader
from paragrad.data.named import are_arrays, named
from paragrad.data.opened import Chosen, Opened
from paragrad.data.paths import are_classes, are_paths
from paragrad.data.plan import Rows
from paragrad.data.source import TARGETS, Arrays, Items, Order, Selected, Source, Weighted, all_rows, joined, leaves, target_of
from paragrad.data.stream import Part, Pieces, Streamed
from paragrad.data.table import Table
from paragrad.data.trees import as_inputs, as_tree, check_rows
from paragrad.data.trees import named as named_leaves
from paragrad.errors import UsageError, unknown

Data: TypeAlias = Any
"""A name, files (a path, a glob, a directory, a list of those), a Table, arrays or tensors (nested in tuples, lists, dicts), a
frame, a map-style Dataset, or a source."""

CATALOGUE: dict[str, str] = {
    "digits": "1,797 handwritten digits of 8x8 pixels, 10 classes (scikit-learn's own copy; no test part)",
    "noise": "rows of standard normal noise, which toy problems are trained on (see: paragrad models); noise:rows=1000",
    "FILE.npz": "a NumPy archive with x_train and y_train (and x_test, y_test for a test part), or with x and y",
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
    warnings: tuple[str, ...] = ()
    """What looks wrong with the data."""
    batch_size: int | None = None
    """The mini-batch size that the data brings, as a DataLoader does."""
    named: tuple[str, ...] | None = None
    """The names of the classes that arrays of text have."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes, where they have any."""
        return self.named if self.opened is None else self.opened.classes


@dataclass(frozen=True)
class _Given:
    """One thing the user gave, read."""

    source: Arrays | Items | Selected | Streamed | Generated
    test: Arrays | None
    name: str
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class _How:
    """How what users give is read."""

    seed: int = 0
    width: int | None = None
    keras: bool = False
    as_classes: bool | None = None
    classes: tuple[str, ...] | None = None

    def meaning(self) -> Meaning:
        return Meaning(False if self.keras else self.as_classes, self.classes)


def split(
    data: Data,
    validation: Data = None,
    holdout: float | None = None,
    seed: int = 0,
    *,
    width: int | None = None,
    keras: bool = False,
    as_classes: bool | None = None,
    otherwise: float | None = None,
) -> Split:
    """Sources to train and to validate on.

    Arrays are taken as they are, but float64 NumPy arrays become float32 (torch tensors keep their type) and integer
    targets int64. The target is the last of a tuple; targets that are text are names of classes. Inputs of bytes become
    float32, images from 0 to 1.

    ``validation`` may be whatever ``data`` may be; of a file with a test part, that part is taken. Without it, the
    test part of the data is used, or ``holdout``, a share of the rows drawn by ``seed``; without either, ``otherwise``.

    ``"noise"`` is drawn by ``seed``, in rows of ``width`` numbers; its test part is a row of zeros. Weights of rows are
    scaled to a mean of 1. For a ``keras`` model, weights are left as they are, and so are arrays. ``as_classes`` says whether
    targets that are whole floats are numbers of classes, as the loss has it; None: where they are 0, 1, ..., K - 1.
    """
    if isinstance(data, Split):
        return data
    if holdout is not None and not 0 <= holdout < 1:
        raise UsageError(f"holdout={holdout}, but it is a share of the rows: above 0 and below 1, or 0 for none.")
    if validation is not None and holdout:
        raise UsageError(f"validation= and holdout={holdout} are both given, but rows to validate on come from one of them.")
    how = _How(seed, width, keras, as_classes)
    table = as_table(data)
    if table is not None:
        return _split_table(table, validation, holdout, how, otherwise)
    given = _read(data, "data", how)
    seen = None if width is not None else overview.look(given.source, seed, classes=given.classes)
    notes = given.notes if seen is None else (seen.note, *given.notes)
    warnings = () if seen is None else seen.warnings
    parts = Split(given.source, None, given.name, notes, None, warnings, given.batch_size, given.classes)
    if validation is not None:
        other = _read(validation, "validation", replace(how, as_classes=_as_classes(given.source), classes=given.classes))
        test = other.test or other.source
        test = test.all() if isinstance(test, Generated) else test
        _check_alike(given.source, test)
        return _scaled(replace(parts, validation=test), keras)
    if given.test is not None and not holdout:
        return replace(parts, validation=given.test)
    holdout = otherwise if holdout is None else holdout
    if not holdout:
        return _scaled(parts, keras)
    if isinstance(given.source, Generated):
        raise UsageError(
            f"holdout={holdout}, but {given.source.what} gives each row once: give rows to validate on as validation=, which "
            "may be another pg.Generated."
        )
    if isinstance(given.source, Streamed):
        note = _said(holdout, _count_held(len(given.source), holdout), len(given.source), seed)
        streamed, apart = given.source.hold_out(holdout, seed)
        return replace(parts, train=streamed, validation=_at_hand(apart), notes=(*notes, note))
    held, rest = _held(len(given.source), holdout, seed)
    note = _said(holdout, len(held), len(given.source), seed)
    if given.test is not None:
        note = f"{note.replace('No test part', 'Holdout')} The test part of {given.name} is not used."
    train, kept = given.source.select(rest), given.source.select(held)
    return _scaled(replace(parts, train=train, validation=kept, notes=(*notes, note)), keras)


def read(
    data: Data, *, keras: bool = False, as_classes: bool | None = None, classes: Sequence[str] | None = None
) -> tuple[Source, str, tuple[str, ...]]:
    """Rows that are no table, with their name and what is to be said of them; of a file with a test part, that part."""
    known = None if classes is None else tuple(classes)
    given = _read(data, "data", _How(keras=keras, as_classes=as_classes, classes=known))
    source = given.test or given.source
    return source.all() if isinstance(source, Generated) else source, given.name, given.notes


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
        if outputs == 1:
            raise UsageError(
                f"The labels are classes (that in row {row} is {int(labels[row])}), but the model has 1 output, and the loss "
                "crossentropy needs one for each class. For yes or no give loss='bce' (--loss bce), for numbers loss='mse'; or "
                "give the model more outputs."
            )
        raise UsageError(
            f"The label in row {row} is {int(labels[row])}, but the model has {outputs} outputs, so labels are 0 to "
            f"{outputs - 1}. Number the classes from 0, or give the model more outputs."
        )


def fingerprint(source: Source) -> str:
    """A short text that changes with the data: shapes, types, and a hash of up to 1,000 rows."""
    if isinstance(source, Streamed | Generated):
        return source.fingerprint()
    if not isinstance(source, Arrays):
        inner = source.dataset if isinstance(source, Items) else source.source if isinstance(source, Selected) else source
        return f"{type(inner).__name__}-{len(source)}"
    rows = torch.from_numpy(np.linspace(0, len(source) - 1, min(len(source), SAMPLE)).round().astype(np.int64))
    found = hashlib.sha256()
    for where, leaf in named_leaves(source.tree, ""):
        found.update(f"{where} {tuple(leaf.shape)} {leaf.dtype};".encode())
        sample = leaf.index_select(0, rows).contiguous()
        found.update(sample.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


# -- reading ----------------------------------------------------------------------------------------------------


def _read(data: Data, what: str, how: _How) -> _Given:
    table = as_table(data)
    if table is not None:
        if table.transforms:
            raise UsageError(
                f"The table given as {what} has transformations, which are fitted on the rows to train on: give a Table there."
            )
        opened = table.open(classes=how.classes, as_classes=how.as_classes)
        return _Given(Arrays(opened.load()), None, table.name, opened.notes, opened.classes)
    if isinstance(data, Arrays):
        return _arrays(data.tree, "arrays", what, how, data.order)
    if isinstance(data, Items):
        return _Given(_items(data, what), None, type(data.dataset).__name__)
    if isinstance(data, str) and data.partition(":")[0].strip().lower() == "noise":
        source, test = builtin.noise(data, what, how.seed, how.width)
        return _Given(source, test, data)
    if isinstance(data, str | Path):
        return _Given(builtin.digits(), None, "digits") if data == "digits" else _file(data, how)
    if isinstance(data, Streamed):
        return _Given(data, None, type(data.pieces).__name__)
    if isinstance(data, Pieces):
        return _Given(Streamed(data), None, type(data).__name__)
    if isinstance(data, DataLoader):
        return _loader(data, what, how)
    if isinstance(data, Generated | IterableDataset):
        generated = data if isinstance(data, Generated) else Generated(data)
        note = f"{generated.what} is read by one process, in the order in which it gives its rows."
        return _Given(generated, None, generated.what, (note,))
    if isinstance(data, Iterator) or inspect.isgeneratorfunction(data):
        raise UsageError(
            f"{what} is a generator, which does not say how many rows make an epoch: give pg.Generated(make, rows=...) or "
            "pg.Generated(make, steps=...), where make is the function that returns it."
        )
    if isinstance(data, TensorDataset):
        return _arrays(_tensors(data), "TensorDataset", what, how)
    if isinstance(data, tuple | list | dict | torch.Tensor | Weighted) or hasattr(data, "__array__"):
        return _arrays(data, "arrays", what, how)
    if isinstance(data, Source):
        return _Given(_own_source(data, what), None, type(data).__name__)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, bytes):
        return _Given(_items(Items(data), what), None, type(data).__name__)
    raise UsageError(
        f"{what} is a {type(data).__name__}, but rows come from a name ({', '.join(CATALOGUE)}), paths of files, a "
        "frame, NumPy arrays or torch tensors (in a tuple, list or dict), a Dataset with __len__ and __getitem__, or a source "
        "of your own with __len__ and batch (pg.Source)."
    )


def _own_source(source: Source, what: str) -> Selected:
    """Take a source of the user's own, tried on a row: what is wrong with it is found before anything is started."""
    if not len(source):
        raise UsageError(f"{what} has no rows.")
    found = source.batch(np.zeros(1, dtype=np.int64))
    wrong = [leaf for leaf in leaves(found) if not isinstance(leaf, torch.Tensor) or len(leaf) != 1]
    if wrong:
        raise UsageError(
            f"{type(source).__name__}.batch gave a {type(wrong[0]).__name__} for one row of {what}: it must return tensors of "
            "as many rows as it was asked for, (x, y) or nested as you like."
        )
    return Selected(source, np.arange(len(source), dtype=np.int64))


def _arrays(data: Any, name: str, what: str, how: _How, order: Order | None = None) -> _Given:
    """Arrays in memory, taken as the same columns of a file are."""
    meaning, notes = how.meaning(), list[str]()
    tree = as_tree(data, what, meaning)
    check_rows(tree, what)
    if not how.keras:  # Keras has layers of its own that scale images
        tree = as_inputs(tree, notes, name)
    notes += [meaning.note] if meaning.note is not None else []
    return _Given(Arrays(tree, order), None, name, tuple(notes), meaning.classes)


def _tensors(data: TensorDataset) -> Any:
    return data.tensors if len(data.tensors) > 1 else data.tensors[0]


def _loader(data: DataLoader[Any], what: str, how: _How) -> _Given:
    loaded = of_loader(data)
    source = loaded.source
    if isinstance(source, Items) and isinstance(source.dataset, TensorDataset) and source.even:
        found = _arrays(_tensors(source.dataset), loaded.name, what, how, source.order)
    else:
        found = _Given(_items(source, what) if isinstance(source, Items) else source, None, loaded.name)
    return replace(found, notes=(loaded.note, *found.notes), batch_size=loaded.batch_size)


def _as_classes(source: Source) -> bool | None:
    """Whether the labels of rows to train on are numbers of classes, which those to validate on are then, too."""
    tree = source.tree if isinstance(source, Arrays) else None
    if tree is None or (isinstance(tree, Mapping) and not any(key in tree for key in TARGETS)):
        return None
    target = leaves(target_of(tree))[-1]
    return not target.is_floating_point() and not target.is_complex()


def _file(path: str | Path, how: _How) -> _Given:
    file = Path(path).expanduser()
    if isinstance(path, str) and not file.suffix and "/" not in path and not file.exists():
        raise unknown("data set", path, CATALOGUE)
    found = archive.read(file)
    notes: list[str] = []
    meaning = how.meaning()
    parts = {"train": archive.part_of(found, "train", file, meaning, notes)}
    notes += [meaning.note] if meaning.note is not None else []
    if "x_test" in found:
        meaning = replace(meaning, as_classes=_as_classes(parts["train"]))
        parts["test"] = archive.part_of(found, "test", file, meaning, notes)
    if "y_test" in found and "test" not in parts:
        raise UsageError(f"{file} has y_test but no x_test. Add x_test, or leave both out.")
    if "test" in parts:
        _check_alike(parts["train"], parts["test"])
    return _Given(parts["train"], parts.get("test"), file.name, tuple(dict.fromkeys(notes)), meaning.classes)


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
        if path.is_dir() or glob.has_magic(str(data)) or path.suffix.lower() not in ("", ".npz") or has_columns(path):
            return Table(data)
    return None


def _split_table(table: Table, validation: Data, holdout: float | None, how: _How, otherwise: float | None) -> Split:
    seed = how.seed
    opened = table.open(as_classes=how.as_classes)
    if validation is None and not holdout:
        validation = test_part(table)
    if validation is None and holdout is None:
        holdout = otherwise
    streamed = _streams(table, opened)
    held, rest = _held_rows(opened, holdout, seed, streamed=streamed) if holdout else (None, None)
    if table.transforms:
        apart = [name for name in (opened.label, opened.weight) if name is not None]
        opened = opened.with_fitted(transforms.fit(table.transforms, lambda: opened.chosen(rest), apart=apart))
    notes = [*opened.notes, *getattr(opened.fitted, "notes", ())]
    if opened.weight is not None and not how.keras:
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
        seen = overview.look(source, seed, opened=opened)
        if holdout:
            source, test = source.hold_out(holdout, seed)
    else:
        source = whole = Arrays(opened.load())
        seen = overview.look(source, seed, opened=opened)
        if isinstance(rest, np.ndarray) and isinstance(held, np.ndarray):
            source, test = whole.select(rest), whole.select(held)
    if test is not None:
        test = _at_hand(test)
        _check_alike(source, test)
    if seen is not None:
        notes.insert(0, seen.note)
    return Split(source, test, table.name, tuple(notes), opened, () if seen is None else seen.warnings)


def test_part(table: Table) -> Table | None:
    """The test part of an .npz that has one, to be read as the part to train on is."""
    if table.tree is not None or not isinstance(table.source, str | Path):
        return None
    return replace(table, tree=PARTS[1]) if PARTS[1] in parts_of(Path(table.source).expanduser()) else None


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
    mine = opened.table
    if table is None:
        if not are_arrays(validation):
            source, _, said = read(validation)
            notes += said
            validation = joined([source.batch(rows) for rows in all_rows(source, len(source))])
        table = replace(named(validation, opened.roles, notes), transforms=mine.transforms)
    elif isinstance(validation, Table):
        table = replace(table, transforms=mine.transforms)
    else:
        label = None if are_classes(table.source) else opened.label
        table = replace(mine, source=table.source, features=opened.features, exclude=None, label=label)
    other = table.open(classes=opened.classes, as_classes=opened.kind is not Label.REAL)
    notes += [note for note in other.notes if note not in notes]
    other = other.with_fitted(opened.fitted).with_scale(opened.scale)
    return Streamed(other) if _streams(table, other) else Arrays(other.load())


def _streams(table: Table, opened: Opened) -> bool:
    """Whether rows are read while training: where that was asked for, or where they would fill half of the free memory."""
    if table.stream is not None:
        return table.stream
    return len(opened) * opened.row_bytes > memory.available() / 2


# -- parts ------------------------------------------------------------------------------------------------------


def _scaled(parts: Split, keras: bool) -> Split:
    if keras:
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
