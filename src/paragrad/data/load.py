"""From what a user gives (a name, a file, arrays, a Dataset) to a source to train on and one to validate on."""

from __future__ import annotations

import hashlib
import math
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paragrad.data.source import Arrays, Items, Source, leaves, mapped, target_key, target_of
from paragrad.errors import UsageError, unknown
from paragrad.options import parse_fields

Data: TypeAlias = Any
"""A name, a path to an .npz, arrays or tensors (nested in tuples, lists, dicts), a map-style Dataset, or a source."""

CATALOGUE: dict[str, str] = {
    "digits": "1,797 handwritten digits of 8x8 pixels, 10 classes (scikit-learn's own copy; no test part)",
    "noise": "rows of standard normal noise, which toy problems are trained on (see: paragrad models); noise:rows=1000",
    "FILE.npz": "a NumPy archive with x_train and y_train, and x_test and y_test if there is a test part",
}
"""What ``data`` may be on the command line, each in a line."""

KEYS = ("x_train", "y_train", "x_test", "y_test")
IGNORED = -100
"""torch's own mark for a target that does not count."""
NOISE_ROWS = 1_000
"""Rows of ``"noise"`` where it is not said how many."""
SAMPLE = 1_000
"""Rows that a fingerprint looks at."""
CHECKED = 65_536
"""Rows whose finiteness is checked at a time, so that the check needs little memory."""


@dataclass(frozen=True)
class Split:
    """What to train on and what to validate on."""

    train: Source
    validation: Source | None
    name: str
    notes: tuple[str, ...]
    """What was done to the data without being asked, to be said aloud."""


@dataclass(frozen=True)
class _Given:
    """One thing the user gave, read."""

    source: Arrays | Items
    test: Arrays | None
    name: str
    notes: tuple[str, ...] = ()


def split(
    data: Data, validation: Data = None, holdout: float | None = None, seed: int = 0, *, width: int | None = None
) -> Split:
    """Sources to train and to validate on.

    Arrays are taken as they are, but float64 NumPy arrays become float32 (torch tensors keep their type) and integer
    targets int64. The target is the last of a tuple. Images of bytes in a file become float32 from 0 to 1.

    ``validation`` may be whatever ``data`` may be; of a file with a test part, that part is taken. Without it, the
    test part of the data is used, or ``holdout``, a share of the rows drawn by ``seed``; without either, none.

    ``"noise"`` is drawn by ``seed``, in rows of ``width`` numbers; its test part is a row of zeros.
    """
    if holdout is not None and not 0 <= holdout < 1:
        raise UsageError(f"holdout={holdout}, but it is a share of the rows: above 0 and below 1, or 0 for none.")
    if validation is not None and holdout:
        raise UsageError(f"validation= and holdout={holdout} are both given, but rows to validate on come from one of them.")
    given = _read(data, "data", seed, width)
    if validation is not None:
        other = _read(validation, "validation", seed, width)
        test = other.test or other.source
        _check_alike(given.source, test)
        return Split(given.source, test, given.name, given.notes)
    if given.test is not None and not holdout:
        return Split(given.source, given.test, given.name, given.notes)
    if not holdout:
        return Split(given.source, None, given.name, given.notes)
    return _hold_out(given, holdout, seed)


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
    if not isinstance(source, Arrays):
        inner = source.dataset if isinstance(source, Items) else source
        return f"{type(inner).__name__}-{len(source)}"
    rows = torch.from_numpy(np.linspace(0, len(source) - 1, min(len(source), SAMPLE)).round().astype(np.int64))
    found = hashlib.sha256()
    for where, leaf in _named(source.tree, ""):
        found.update(f"{where} {tuple(leaf.shape)} {leaf.dtype};".encode())
        sample = leaf.index_select(0, rows).contiguous()
        found.update(sample.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


# -- reading ----------------------------------------------------------------------------------------------------


def _read(data: Data, what: str, seed: int, width: int | None) -> _Given:
    if isinstance(data, Arrays | Items):
        source = _arrays(_tree(data.tree, what), what) if isinstance(data, Arrays) else _items(data, what)
        return _Given(source, None, "arrays" if isinstance(data, Arrays) else type(data.dataset).__name__)
    if isinstance(data, str) and data.partition(":")[0].strip().lower() == "noise":
        return _noise(data, what, seed, width)
    if isinstance(data, str | Path):
        return _digits() if data == "digits" else _file(data)
    if isinstance(data, DataLoader):
        raise UsageError(
            f"{what} is a DataLoader, but paragrad deals the batches itself: give its dataset, {what}=loader.dataset."
        )
    if isinstance(data, IterableDataset):
        raise UsageError(
            f"{what} is an IterableDataset ({type(data).__name__}), whose rows cannot be dealt to workers by number. Give a "
            "map-style Dataset with __len__ and __getitem__, or arrays, for instance those of list(dataset)."
        )
    if isinstance(data, TensorDataset):
        tree = _tree(data.tensors if len(data.tensors) > 1 else data.tensors[0], what)
        return _Given(_arrays(tree, what), None, "TensorDataset")
    if isinstance(data, tuple | list | dict | torch.Tensor) or hasattr(data, "__array__"):
        return _Given(_arrays(_tree(data, what), what), None, "arrays")
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, bytes):
        return _Given(_items(Items(data), what), None, type(data).__name__)
    raise UsageError(
        f"{what} is a {type(data).__name__}, but rows come from a name ({', '.join(CATALOGUE)}), a path to an .npz, NumPy "
        "arrays or torch tensors (in a tuple, list or dict), or a Dataset with __len__ and __getitem__."
    )


def _digits() -> _Given:
    from sklearn.datasets import load_digits  # a second to import

    pixels, labels = load_digits(return_X_y=True)
    tree = (torch.from_numpy((pixels / 16).astype(np.float32)), torch.from_numpy(labels.astype(np.int64)))
    return _Given(Arrays(tree), None, "digits")


def _noise(text: str, what: str, seed: int, width: int | None) -> _Given:
    _, fields = parse_fields(text)
    for key in fields:
        if key != "rows":
            raise unknown(f"field of {what} 'noise':", key, ["rows"])
    rows = fields.get("rows", NOISE_ROWS)
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise UsageError(f"rows={rows} in {text!r}, but it is a whole number of at least 1.")
    if width is None:
        raise UsageError(
            f"{what}={text!r} is what toy problems are trained on, but the model is none. Give a toy problem as the model, "
            "such as beale (paragrad models lists them; in Python: paragrad.toys.Beale()), or other data."
        )
    drawn = np.random.default_rng((seed, 3)).standard_normal((rows, width), dtype=np.float32)
    # Without noise there is only one thing to test: the function where the center is.
    return _Given(Arrays(torch.from_numpy(drawn)), Arrays(torch.zeros(1, width)), text)


def _file(path: str | Path) -> _Given:
    file = Path(path).expanduser()
    if isinstance(path, str) and not file.suffix and "/" not in path and not file.exists():
        raise unknown("data set", path, CATALOGUE)
    found = _archive(file)
    notes: list[str] = []
    parts = {part: _part(found, part, file, notes) for part in ("train", "test") if part == "train" or f"x_{part}" in found}
    if "y_test" in found and "test" not in parts:
        raise UsageError(f"{file} has y_test but no x_test. Add x_test, or leave both out.")
    if "test" in parts:
        _check_alike(parts["train"], parts["test"])
    return _Given(parts["train"], parts.get("test"), file.name, tuple(dict.fromkeys(notes)))


def _archive(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of an .npz that are ours; the others are not even unpacked."""
    if not file.is_file():
        raise UsageError(f"{file} is {'a directory' if file.is_dir() else 'not there'}. Give the path of an .npz file.")
    try:
        with file.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise UsageError(f"{file} holds one array only. Write an .npz: np.savez(path, x_train=..., y_train=...).")
            with archive:
                for key in KEYS[:2]:
                    if key not in archive.files:
                        near = get_close_matches(key, set(archive.files) - set(KEYS), n=1)
                        hint = f" Rename {near[0]!r}?" if near else ""
                        raise UsageError(
                            f"{file} has no array {key!r}.{hint} It has: {', '.join(archive.files) or 'none at all'}. "
                            "Write it by np.savez(path, x_train=..., y_train=..., x_test=..., y_test=...)."
                        )
                return {key: archive[key] for key in archive.files if key in KEYS}
    except UsageError:
        raise
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        if "pickle" in str(error) and zipfile.is_zipfile(file):
            raise UsageError(
                f"{file} holds pickled Python objects, which may run any code when they are read. Save plain numbers: "
                "np.savez(path, x_train=x.astype('float32'), ...)."
            ) from error
        raise UsageError(
            f"{file} cannot be read as an .npz ({type(error).__name__}: {error}). It may be cut short, or of another kind: "
            "write it anew by np.savez(path, x_train=..., y_train=...)."
        ) from error


def _part(found: dict[str, np.ndarray[Any, Any]], part: str, file: Path, notes: list[str]) -> Arrays:
    x, y = found[f"x_{part}"], found.get(f"y_{part}")
    if y is None:
        raise UsageError(f"{file} has x_{part} but no y_{part}. Add y_{part}, or leave both out.")
    if x.dtype == np.uint8 and x.ndim >= 3:
        x = np.divide(x, np.float32(255), dtype=np.float32)
        notes.append(f"The images of {file.name} are bytes: they are scaled to float32 from 0 to 1.")
    named = _converted({f"x_{part}": x, f"y_{part}": y}, file.name)
    _check_rows(named, file.name)
    return Arrays((named[f"x_{part}"], _labels(named[f"y_{part}"])))


# -- converting -------------------------------------------------------------------------------------------------


def _arrays(tree: Any, what: str) -> Arrays:
    _check_rows(tree, what)
    return Arrays(tree)


def _items(items: Items, what: str) -> Items:
    if not len(items):
        raise UsageError(f"{what} ({type(items.dataset).__name__}) has no rows.")
    return items


def _tree(data: Any, what: str) -> Any:
    """The same nesting with every array a tensor that has rows."""
    tree = _converted(data, what)
    if not leaves(tree):
        raise UsageError(f"{what} is empty: give at least one array.")
    if isinstance(tree, dict):
        key = target_key(tree)
        return {**tree, key: mapped(tree[key], _labels)}
    if isinstance(tree, tuple):
        return tree[0] if len(tree) == 1 else (*tree[:-1], mapped(tree[-1], _labels))
    return tree


def _converted(data: Any, where: str) -> Any:
    if isinstance(data, dict):
        return {key: _converted(value, f"{where}[{key!r}]") for key, value in data.items()}
    if isinstance(data, tuple) or (isinstance(data, list) and _holds_arrays(data)):
        return tuple(_converted(value, f"{where}[{index}]") for index, value in enumerate(data))
    leaf = data.detach().cpu() if isinstance(data, torch.Tensor) else _tensor(_array(data, where), where)
    if not leaf.ndim:
        raise UsageError(f"{where} is a single number, but an array needs one row for each example.")
    return leaf


def _holds_arrays(values: list[Any]) -> bool:
    return any(
        _holds_arrays(value) if isinstance(value, list) else isinstance(value, tuple | dict) or hasattr(value, "__array__")
        for value in values
    )


def _array(data: Any, where: str) -> np.ndarray[Any, Any]:
    if isinstance(data, np.ma.MaskedArray):
        raise UsageError(f"{where} is a masked array, whose mask would be lost: fill it, as by {where}.filled(0).")
    if (
        data is None
        or isinstance(data, str | bytes)
        or not (isinstance(data, list | int | float) or hasattr(data, "__array__"))
    ):
        raise UsageError(f"{where} is a {type(data).__name__}, but it must be a NumPy array or a torch tensor.")
    try:
        return np.asarray(data)
    except ValueError as error:
        raise UsageError(f"{where} is a ragged list ({error}): give every row the same length.") from error


def _tensor(array: np.ndarray[Any, Any], where: str) -> torch.Tensor:
    if array.dtype.kind not in "biufc":
        raise UsageError(
            f"{where} is of type {array.dtype}, but only numbers can be trained on: turn it into numbers of one type, "
            "as by .astype('float32')."
        )
    narrow = {"float64": "float32", "float128": "float32", "uint16": "int32", "uint32": "int64", "uint64": "int64"}
    name = array.dtype.newbyteorder("=").name
    array = np.asarray(array, dtype=narrow.get(name, name))
    if array.ndim:
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        # torch warns that a read-only array must not be written to; sources are only read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.from_numpy(array)


def _labels(leaf: torch.Tensor) -> torch.Tensor:
    return leaf if leaf.is_floating_point() or leaf.is_complex() else leaf.to(torch.int64)


# -- checking ---------------------------------------------------------------------------------------------------


def _named(tree: Any, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _named(value, f"{where}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for index, value in enumerate(tree):
            yield from _named(value, f"{where}[{index}]")
    else:
        yield where, tree


def _check_rows(tree: Any, what: str) -> None:
    first, length = "", -1
    for where, leaf in _named(tree, what):
        if length < 0:
            first, length = where, len(leaf)
        if len(leaf) != length:
            raise UsageError(f"{first} has {length:,} rows, but {where} has {len(leaf):,}: give each row its target.")
        if not length:
            raise UsageError(f"{where} has no rows (its shape is {tuple(leaf.shape)}).")
        if not leaf.numel():
            raise UsageError(f"{where} has rows without a value (its shape is {tuple(leaf.shape)}).")
        _check_finite(leaf, where)


def _check_finite(leaf: torch.Tensor, where: str) -> None:
    if not leaf.is_floating_point():
        return
    rows: list[int] = []
    for start in range(0, len(leaf), CHECKED):
        part = leaf[start : start + CHECKED]
        if not torch.isfinite(part.sum()):
            bad = ~torch.isfinite(part).reshape(len(part), -1).all(1)
            rows += (start + bad.nonzero().reshape(-1)).tolist()
    if rows:
        raise UsageError(
            f"{where} has NaN or infinity in {len(rows):,} of {len(leaf):,} rows, first in row {rows[0]}. "
            "Leave these rows out, or put a number in their place."
        )


def _check_alike(train: Arrays | Items, validation: Arrays | Items) -> None:
    if not (isinstance(train, Arrays) and isinstance(validation, Arrays)):
        return
    shapes = [[tuple(leaf.shape[1:]) for leaf in leaves(source.tree)] for source in (train, validation)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"A row to train on has the shapes {shapes[0]}, but one to validate on {shapes[1]}. Give both the same "
            "arrays in one order."
        )


def _hold_out(given: _Given, share: float, seed: int) -> Split:
    total = len(given.source)
    count = math.ceil(share * total - 1e-9)
    if not 0 < count < total:
        raise UsageError(f"holdout={share} of {total:,} rows is {count:,}: at least 1 must be held out and 1 left to train on.")
    order = np.random.default_rng((seed, 2)).permutation(total)
    held, rest = np.sort(order[:count]), np.sort(order[count:])
    why = "Holdout" if given.test is not None else "No test part"
    note = f"{why}: {100 * share:.4g} % of the rows ({count:,} of {total:,}, by seed {seed}) are held out for validation."
    if given.test is not None:
        note += f" The test part of {given.name} is not used."
    return Split(given.source.select(rest), given.source.select(held), given.name, (*given.notes, note))
