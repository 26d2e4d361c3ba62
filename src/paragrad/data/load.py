"""Turn the data that a user gives (a name, a file, arrays, a Dataset) into sources to train and to validate on."""

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
from paragrad.data.named import are_arrays, table_of
from paragrad.data.opened import Chosen, Opened
from paragrad.data.paths import are_classes, are_paths
from paragrad.data.plan import Rows
from paragrad.data.source import (
    IGNORED,
    Arrays,
    Items,
    Order,
    Selected,
    Source,
    Weighted,
    find_target,
    is_whole,
    leaves,
    target_of,
)
from paragrad.data.stream import SAMPLE, Part, Pieces, Streamed
from paragrad.data.table import Table
from paragrad.data.trees import as_inputs, as_tree, check_rows, named_leaves
from paragrad.errors import UsageError, unknown

Data: TypeAlias = Any
"""A name, files (a path, a glob, a directory, a list of those), a Table, a frame, arrays or tensors (nested in tuples, lists or
dicts), a map-style Dataset, or a source."""

CATALOGUE: dict[str, str] = {
    "digits": "1,797 handwritten digits of 8x8 pixels, 10 classes (scikit-learn's own copy; no test part)",
    "noise": "rows of standard normal noise, which toy problems are trained on (see: paragrad models); noise:rows=1000",
    "FILE.npz": "a NumPy archive with x_train and y_train (and x_test, y_test for a test part), or with x and y",
    "FILE": "a table: .csv, .parquet, .h5, .root, .npy, .npz (its columns: paragrad data FILE); a glob or a directory of them",
    "CLASS=FILE": "the rows of one class; give --data for each",
}
"""Values of ``data`` on the command line, each with a description."""


@dataclass(frozen=True)
class Split:
    """Rows to train on and rows to validate on."""

    train: Source
    validation: Source | None
    name: str
    notes: tuple[str, ...] = ()
    """Notes for the user about changes to the data that were not requested."""
    opened: Opened | None = None
    """The table of the training rows, with fitted transformations."""
    warnings: tuple[str, ...] = ()
    """Warnings about likely mistakes in the data."""
    batch_size: int | None = None
    """Mini-batch size that the data defines, as a DataLoader does."""
    named: tuple[str, ...] | None = None
    """Names of the classes, if the labels are arrays of text."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, if they have names."""
        return self.named if self.opened is None else self.opened.classes


@dataclass(frozen=True)
class _Options:
    """Options for reading data."""

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
    """Return sources to train and to validate on.

    Arrays are used as they are, except that float64 NumPy arrays become float32 (torch tensors keep their type) and integer
    targets int64. The target is the last of a tuple; targets of text are class names. Inputs of bytes become float32, images
    from 0 to 1.

    ``validation`` takes the same as ``data``; of a file with a test part, that part is used. Without ``validation``, the test
    part of the data is used; else ``holdout``, a share of the rows drawn by ``seed``; else ``otherwise``, another such share.

    ``"noise"`` is drawn by ``seed``, in rows of ``width`` numbers; its test part is one row of zeros. Weights of rows are
    scaled to a mean of 1. For a ``keras`` model, weights and arrays are not changed. ``as_classes`` tells whether whole floats
    in targets are class numbers, which depends on the loss; None: only if they are exactly 0, 1, ..., K - 1.
    """
    if isinstance(data, Split):
        return data
    if holdout is not None and not 0 <= holdout < 1:
        raise UsageError(f"holdout={holdout}, but it must be a share of the rows: above 0 and below 1, or 0 for none.")
    if validation is not None and holdout:
        raise UsageError(f"validation= and holdout={holdout} are both given: give only one of them.")
    how = _Options(seed, width, keras, as_classes)
    table = as_table(data)
    if table is not None:
        return _split_table(table, validation, holdout, how, otherwise)
    given = _read(data, "data", how)
    source, test = given.train, given.validation
    found = None if width is not None else overview.look(source, seed, classes=given.classes)
    if found is not None:
        given = replace(given, notes=(found.note, *given.notes), warnings=found.warnings)
    if validation is not None:
        other = _read(validation, "validation", replace(how, as_classes=_as_classes(source), classes=given.classes))
        test = _test_rows(other)
        _check_alike(source, test)
        return _scaled(replace(given, validation=test), keras)
    if test is not None and not holdout:
        return given
    holdout = otherwise if holdout is None else holdout
    if not holdout:
        return _scaled(given, keras)
    if isinstance(source, Generated):
        raise UsageError(
            f"holdout={holdout}, but {source.what} yields each row only once: give rows to validate on as validation=, which "
            "may be another pg.Generated."
        )
    note = _holdout_note(holdout, len(source), seed)
    if isinstance(source, Streamed):
        train, held_out = source.hold_out(holdout, seed)
        return replace(given, train=train, validation=_in_memory(held_out), notes=(*given.notes, note))
    if test is not None:
        note = f"{note.replace('No test part', 'Holdout')} The test part of {given.name} is not used."
    assert isinstance(source, Arrays | Items | Selected)
    held, rest = _hold_out(len(source), holdout, seed)
    parts = replace(given, train=source.select(rest), validation=source.select(held), notes=(*given.notes, note))
    return _scaled(parts, keras)


def read(
    data: Data, *, keras: bool = False, as_classes: bool | None = None, classes: Sequence[str] | None = None
) -> tuple[Source, str, tuple[str, ...]]:
    """Return rows that are not a table, with their name and notes; of a file with a test part, that part."""
    known = None if classes is None else tuple(classes)
    given = _read(data, "data", _Options(keras=keras, as_classes=as_classes, classes=known))
    return _test_rows(given), given.name, given.notes


def _test_rows(given: Split) -> Source:
    source = given.validation or given.train
    return source.all() if isinstance(source, Generated) else source


def check_labels(source: Source, outputs: int) -> None:
    """Raise if a class label has no output in the model."""
    if not isinstance(source, Arrays):
        return
    labels = leaves(target_of(source.tree))[-1]
    if labels.ndim != 1 or not is_whole(labels):
        return
    wrong = ((labels < 0) | (labels >= outputs)) & (labels != IGNORED)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        if outputs == 1:
            raise UsageError(
                f"The labels are classes (row {row} has class {int(labels[row])}), but the model has 1 output, and the loss "
                "crossentropy needs one per class. For two classes give loss='bce' (--loss bce), for numbers loss='mse'; or "
                "give the model more outputs."
            )
        raise UsageError(
            f"The label in row {row} is {int(labels[row])}, but the model has {outputs} outputs, so labels must be 0 to "
            f"{outputs - 1}. Number the classes from 0, or give the model more outputs."
        )


def fingerprint(source: Source) -> str:
    """Return a short text that changes with the data: a hash of shapes, types, and up to 1,000 rows."""
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


def _read(data: Data, what: str, how: _Options) -> Split:
    table = as_table(data)
    if table is not None:
        if table.transforms:
            raise UsageError(
                f"The table given as {what} has transformations, which are fitted on the rows to train on: give a Table there."
            )
        opened = replace(table.open(classes=how.classes, as_classes=how.as_classes), scales_images=not how.keras)
        return Split(Arrays(opened.load()), None, table.name, opened.notes, named=opened.classes)
    if isinstance(data, Arrays):
        return _arrays(data.tree, "arrays", what, how, data.order)
    if isinstance(data, Items):
        return _items(data, what)
    if isinstance(data, str) and data.partition(":")[0].strip().lower() == "noise":
        source, test = builtin.noise(data, what, how.seed, how.width)
        return Split(source, test, data)
    if isinstance(data, str | Path):
        return Split(builtin.digits(), None, "digits") if data == "digits" else _file(data, how)
    if isinstance(data, Streamed):
        return Split(data, None, type(data.pieces).__name__)
    if isinstance(data, Pieces):
        return Split(Streamed(data), None, type(data).__name__)
    if isinstance(data, DataLoader):
        return _loader(data, what, how)
    if isinstance(data, Generated | IterableDataset):
        generated = data if isinstance(data, Generated) else Generated(data)
        note = f"One process reads {generated.what}, in the order in which it yields its rows."
        return Split(generated, None, generated.what, (note,))
    if isinstance(data, Iterator) or inspect.isgeneratorfunction(data):
        raise UsageError(
            f"{what} is a generator, which does not say how many rows make an epoch: give pg.Generated(make, rows=...) or "
            "pg.Generated(make, steps=...), where make is the function that returns it."
        )
    if isinstance(data, TensorDataset):
        return _arrays(data.tensors, "TensorDataset", what, how)
    if isinstance(data, tuple | list | dict | torch.Tensor | Weighted) or hasattr(data, "__array__"):
        return _arrays(data, "arrays", what, how)
    if isinstance(data, Source):
        return Split(_custom_source(data, what), None, type(data).__name__)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, bytes):
        return _items(Items(data), what)
    raise UsageError(
        f"{what} is a {type(data).__name__}, but rows come from a name ({', '.join(CATALOGUE)}), paths of files, a "
        "frame, NumPy arrays or torch tensors (in a tuple, list or dict), a Dataset with __len__ and __getitem__, or your own "
        "source with __len__ and batch (pg.Source)."
    )


def _custom_source(source: Source, what: str) -> Selected:
    """Return a user-defined source. Read one row from it, so that errors show before the run starts."""
    if not len(source):
        raise UsageError(f"{what} has no rows.")
    found = source.batch(np.zeros(1, dtype=np.int64))
    wrong = [leaf for leaf in leaves(found) if not isinstance(leaf, torch.Tensor) or len(leaf) != 1]
    if wrong:
        raise UsageError(
            f"{type(source).__name__}.batch returned a {type(wrong[0]).__name__} for one row of {what}: it must return tensors "
            "with as many rows as requested, as (x, y) or in any other nesting."
        )
    return Selected(source, np.arange(len(source), dtype=np.int64))


def _arrays(data: Any, name: str, what: str, how: _Options, order: Order | None = None) -> Split:
    """Return arrays in memory, read like the same columns of a file."""
    meaning, notes = how.meaning(), list[str]()
    tree = as_tree(data, what, meaning)
    check_rows(tree, what)
    if not how.keras:  # Keras models scale images by their own layers
        tree = as_inputs(tree, notes, name)
    notes += [meaning.note] if meaning.note is not None else []
    return Split(Arrays(tree, order), None, name, tuple(notes), named=meaning.classes)


def _loader(data: DataLoader[Any], what: str, how: _Options) -> Split:
    source, batch_size, note = of_loader(data)
    if isinstance(source, Generated):
        found = Split(source, None, source.what)
    elif isinstance(source.dataset, TensorDataset) and source.even:
        found = _arrays(source.dataset.tensors, type(source.dataset).__name__, what, how, source.order)
    else:
        found = _items(source, what)
    return replace(found, notes=(note, *found.notes), batch_size=batch_size)


def _as_classes(source: Source) -> bool | None:
    """Return whether the labels of training rows are class numbers: labels of validation rows then do, too."""
    tree = source.tree if isinstance(source, Arrays) else None
    if tree is None or (isinstance(tree, Mapping) and find_target(tree) is None):
        return None
    return is_whole(leaves(target_of(tree))[-1])


def _file(path: str | Path, how: _Options) -> Split:
    file = Path(path).expanduser()
    if isinstance(path, str) and not file.suffix and "/" not in path and not file.exists():
        raise unknown("data set", path, CATALOGUE)
    found = archive.read(file)
    notes: list[str] = []
    meaning = how.meaning()
    train, test = archive.part_of(found, "train", file, meaning, notes, keras=how.keras), None
    notes += [meaning.note] if meaning.note is not None else []
    if "x_test" in found:
        meaning = replace(meaning, as_classes=_as_classes(train))
        test = archive.part_of(found, "test", file, meaning, notes, keras=how.keras)
        _check_alike(train, test)
    elif "y_test" in found:
        raise UsageError(f"{file} has y_test but no x_test. Add x_test, or leave both out.")
    return Split(train, test, file.name, tuple(dict.fromkeys(notes)), named=meaning.classes)


def _items(items: Items, what: str) -> Split:
    name = type(items.dataset).__name__
    if not len(items):
        raise UsageError(f"{what} ({name}) has no rows.")
    return Split(items, None, name)


def as_table(data: Data) -> Table | None:
    """Return files or a frame as a table; None for data of another kind."""
    if isinstance(data, Table):
        return data
    if is_frame(data) or are_classes(data) or (isinstance(data, list | tuple) and are_paths(data)):
        return Table(data)
    if isinstance(data, str | Path):
        path = Path(data).expanduser()
        if path.is_dir() or glob.has_magic(str(data)) or path.suffix.lower() not in ("", ".npz") or has_columns(path):
            return Table(data)
    return None


def _split_table(table: Table, validation: Data, holdout: float | None, how: _Options, otherwise: float | None) -> Split:
    seed = how.seed
    opened = replace(table.open(as_classes=how.as_classes), scales_images=not how.keras)
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
        opened = replace(opened, scale=weights.factor(opened.mean_weight(rest), notes))
    test = None if validation is None else _validation_rows(opened, validation, notes)
    if holdout:
        notes.append(_holdout_note(holdout, len(opened), seed))
    if streamed:
        notes.append(f"The {len(opened):,} rows of {table.name} are read while training (stream).")
    whole = Streamed(opened) if streamed else Arrays(opened.load())
    found = overview.look(whole, seed, opened=opened)
    source: Source = whole
    if holdout and isinstance(whole, Streamed):
        source, test = whole.hold_out(holdout, seed)
    elif isinstance(whole, Arrays) and isinstance(rest, np.ndarray) and isinstance(held, np.ndarray):
        source, test = whole.select(rest), whole.select(held)
    if test is not None:
        test = _in_memory(test)
        _check_alike(source, test)
    if found is not None:
        notes.insert(0, found.note)
    return Split(source, test, table.name, tuple(notes), opened, () if found is None else found.warnings)


def test_part(table: Table) -> Table | None:
    """Return the test part of an .npz as a table with the same options; None if it has none."""
    if table.tree is not None or not isinstance(table.source, str | Path):
        return None
    return replace(table, tree=PARTS[1]) if PARTS[1] in parts_of(Path(table.source).expanduser()) else None


def _held_rows(opened: Opened, share: float, seed: int, *, streamed: bool) -> tuple[Chosen, Chosen]:
    """Return the rows that are held out, and the others; of streamed rows, a share of each piece."""
    if not streamed:
        return _hold_out(len(opened), share, seed)
    lengths = np.asarray(opened.lengths, dtype=np.int64)

    def chosen(held: bool) -> Callable[[int], Rows]:
        part = Part(share, seed, held)
        counts = part.counts(lengths)
        return lambda piece: part.rows(piece, int(lengths[piece]), int(counts[piece]))

    return chosen(True), chosen(False)


def _in_memory(source: Source) -> Source:
    """Load validation rows, which are read many times, if they fit into an eighth of the free memory."""
    if not isinstance(source, Streamed) or len(source) * source.row_bytes > memory.available() / 8:
        return source
    return source.all()


def _validation_rows(opened: Opened, validation: Data, notes: list[str]) -> Source:
    """Return rows to validate on, read like the rows to train on."""
    table = as_table(validation)
    mine = opened.table
    if table is None:
        if not are_arrays(validation):
            source, _, found = read(validation)
            notes += found
            validation = source.batch(np.arange(len(source), dtype=np.int64))
        table = replace(table_of(validation, opened.roles, notes), transforms=mine.transforms)
    elif isinstance(validation, Table):
        table = replace(table, transforms=mine.transforms)
    else:
        label = None if are_classes(table.source) else opened.label
        table = replace(mine, source=table.source, features=opened.features, exclude=None, label=label)
    other = table.open(classes=opened.classes, as_classes=opened.kind is not Label.REAL)
    notes += [note for note in other.notes if note not in notes]
    other = replace(other.with_fitted(opened.fitted), scale=opened.scale, scales_images=opened.scales_images)
    return Streamed(other) if _streams(table, other) else Arrays(other.load())


def _streams(table: Table, opened: Opened) -> bool:
    """Return whether rows are read during training: on request, or if they would fill half of the free memory."""
    if table.stream is not None:
        return table.stream
    return len(opened) * opened.row_bytes > memory.available() / 2


def _scaled(parts: Split, keras: bool) -> Split:
    """Scale the weights of all rows by the mean weight of the training rows, if these have weights."""
    train = parts.train
    if keras or not (isinstance(train, Arrays) and isinstance(train.tree, Weighted)):
        return parts
    notes = list(parts.notes)
    scale = weights.factor(float(train.tree.weight.double().abs().mean()), notes)
    validation = weights.times(parts.validation, scale)
    return replace(parts, train=weights.times(train, scale), validation=validation, notes=tuple(notes))


def _check_alike(train: Source, validation: Source) -> None:
    if not (isinstance(train, Arrays) and isinstance(validation, Arrays)):
        return
    # Only one of them may have weights.
    trees = [source.tree.rows if isinstance(source.tree, Weighted) else source.tree for source in (train, validation)]
    shapes = [[tuple(leaf.shape[1:]) for leaf in leaves(tree)] for tree in trees]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"A row to train on has the shapes {shapes[0]}, but a row to validate on has {shapes[1]}. Give both the same "
            "arrays in the same order."
        )


def _hold_out(total: int, share: float, seed: int) -> tuple[Rows, Rows]:
    """Return the rows that are held out, and the others."""
    count = _count_held_out(total, share)
    order = np.random.default_rng((seed, 2)).permutation(total)
    return np.sort(order[:count]), np.sort(order[count:])


def _count_held_out(total: int, share: float) -> int:
    count = math.ceil(share * total - 1e-9)
    if not 0 < count < total:
        raise UsageError(f"holdout={share} of {total:,} rows is {count:,}: at least 1 must be held out and 1 left to train on.")
    return count


def _holdout_note(share: float, total: int, seed: int) -> str:
    return (
        f"No test part: {100 * share:.4g} % of the rows ({_count_held_out(total, share):,} of {total:,}, by seed {seed}) are "
        "held out for validation."
    )
