"""What is said of rows before they are trained on: features, label and classes; and what looks wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paragrad.data.formats.file import Array
from paragrad.data.generated import Generated
from paragrad.data.opened import Opened
from paragrad.data.source import TARGETS, Arrays, Items, Source, Weighted, joined, leaves, target_of
from paragrad.data.stream import Streamed

SAMPLED = 4_096
"""Rows whose values are looked at."""
VALUES = 4_000_000
"""Values that are looked at: of wide rows, fewer."""
OF_A_DATASET = 512
"""Rows of a Dataset that are looked at: each may have to be decoded."""
PIECES = 8
"""Pieces of a streamed table that are looked at."""
LISTED, SHOWN = 12, 5
"""As many names are listed; of more, so many, and the last."""
HANDFUL = 10
"""Rows below which a class may be a mistake, where the others have far more."""
FEWEST = 100
"""Rows from which on it is told whether one feature alone predicts the label."""
ALONE = 0.02
"""Share of wrong rows below which a feature predicts the label almost alone; also a tenth of the share of the rarer classes."""
APART = 1_000
"""Scales of columns that differ by this much need scaling, and so does ..."""
LARGE = 100
"""... a column whose values go beyond this."""
IGNORED = -100
"""torch's own mark for a target that does not count."""


@dataclass(frozen=True)
class Overview:
    """What is to be said of rows."""

    note: str
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Looked:
    """A sample of the rows, and all labels where they can be had."""

    tree: Any
    labels: torch.Tensor | None
    whole: bool
    """Whether the labels are those of all rows."""


def look(source: Source, seed: int, *, opened: Opened | None = None, classes: Sequence[str] | None = None) -> Overview | None:
    """What is to be said of the rows of a source; None where they are nothing that can be described."""
    found = _sample(source, seed)
    if found is None or not all(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in leaves(found.tree)):
        return None
    names = None if opened is None else opened.names
    inputs = _inputs(found.tree)
    counts = None if opened is None else opened.counts
    if counts is None and found.labels is not None:
        counts = _counts(found.labels, classes)
    total = sum(counts.values()) if counts is not None else 0
    target = None if inputs is found.tree else leaves(target_of(found.tree))[-1]
    uneven = isinstance(source, Items) and not source.even
    said = "Inputs as collate makes them" if uneven else _features(inputs, names)
    if target is not None:
        said += f"; {_label(target, counts, opened, found.whole)}"
    if opened is not None and opened.weight is not None:
        said += f"; weight: {opened.weight}"
    warnings: list[str] = []
    if counts is not None:
        warnings += _of_classes(counts, total, found.whole or opened is not None)
    columns, called = (None, []) if uneven else _columns(inputs, names)
    if columns is not None:
        warnings += _of_scales(columns, called)
        if counts is not None and len(counts) > 1 and target is not None:
            warnings += _of_one_feature(columns, called, np.asarray(target), seed)
    return Overview(f"{said}.", tuple(warnings))


# -- rows to look at --------------------------------------------------------------------------------------------


def _sample(source: Source, seed: int) -> _Looked | None:
    draw = np.random.default_rng((seed, 8))
    if isinstance(source, Arrays):
        most = _most(source.tree)
        rows = np.sort(draw.permutation(len(source))[:most]) if len(source) > most else np.arange(len(source), dtype=np.int64)
        target = _target(source.tree)
        return _Looked(source.batch(rows), target, True)
    if isinstance(source, Items):
        rows = np.sort(draw.permutation(len(source))[:OF_A_DATASET])
        tree = source.batch(rows)
        if not all(isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == len(rows) for leaf in leaves(tree)):
            return None
        return _Looked(tree, _target(tree), len(rows) == len(source))
    if isinstance(source, Streamed):
        filled = np.flatnonzero(source.lengths)
        # Rows that a user's own code reads are looked at in one piece: reading may take long.
        most = PIECES if isinstance(source.pieces, Opened) else 1
        chosen = filled[np.linspace(0, len(filled) - 1, min(most, len(filled))).round().astype(np.int64)]
        trees = []
        for piece in np.unique(chosen).tolist():
            part = Arrays(source.load(piece))
            room = max(1, _most(part.tree) // len(chosen))
            trees.append(part.batch(np.sort(draw.permutation(len(part))[:room])))
        return _Looked(joined(trees), None, False)
    if isinstance(source, Generated):
        return _Looked(source.sample, None, False)
    return None


def _most(tree: Any) -> int:
    width = sum(leaf[:1].numel() for leaf in leaves(tree))
    return max(1, min(SAMPLED, VALUES // max(1, width)))


def _target(tree: Any) -> torch.Tensor | None:
    """The labels, where there is one whole number in each row."""
    if _inputs(tree) is tree or (isinstance(tree, Weighted) and _inputs(tree) is tree.rows):
        return None
    found = leaves(target_of(tree))
    if len(found) > 1 or not isinstance(found[0], torch.Tensor):
        return None
    whole = found[0].ndim == 1 and not found[0].is_floating_point() and not found[0].is_complex()
    return found[0] if whole else None


def _inputs(tree: Any) -> Any:
    """What a model is to predict from; the tree itself where it has no target beside it."""
    if isinstance(tree, Weighted):
        return _inputs(tree.rows)
    if isinstance(tree, Mapping):
        key = next((name for name in TARGETS if name in tree), None)
        return tree if key is None else {name: value for name, value in tree.items() if name != key}
    if isinstance(tree, tuple | list) and len(tree) > 1:
        return tree[0] if len(tree) == 2 else tuple(tree[:-1])
    return tree


def _columns(inputs: Any, names: Sequence[str] | None) -> tuple[Array | None, list[str]]:
    """The numbers of each row side by side, with what each is called; None where inputs are several, or no floats."""
    found = leaves(inputs)
    if len(found) != 1 or not found[0].is_floating_point() or (found[0].ndim < 2 and names is None):
        return None, []
    values = found[0].reshape(len(found[0]), -1).float().numpy()
    if names is not None and len(names) == values.shape[1]:
        return values, [f"Column {name!r}" for name in names]
    shape = tuple(found[0].shape[1:])
    places = [place if len(shape) > 1 else place[0] for place in np.ndindex(*shape)] if shape else [0]
    return values, [f"Input {place}" for place in places]


# -- what is said -----------------------------------------------------------------------------------------------


def _features(inputs: Any, names: Sequence[str] | None) -> str:
    if names is not None:
        listed = list(names) if len(names) <= LISTED else [*names[:SHOWN], "...", names[-1]]
        return f"Features ({len(names)}): {', '.join(listed)}"
    shapes = [tuple(leaf.shape[1:]) for leaf in leaves(inputs)]
    if len(shapes) > 1:
        return f"Inputs: {' and '.join(map(str, shapes))} in each row"
    return f"Features ({shapes[0][0]})" if len(shapes[0]) == 1 else f"Features of shape {shapes[0]}"


def _label(target: torch.Tensor, counts: Mapping[Any, int] | None, opened: Opened | None, whole: bool) -> str:
    name = "label" if opened is None or opened.label is None else f"label: {opened.label}"
    if counts is not None:
        looked = "" if whole or opened is not None else f"of {sum(counts.values()):,} rows looked at: "
        if len(counts) <= LISTED:
            return f"{name} ({looked}{', '.join(f'{key} {counts[key]:,}' for key in sorted(counts))})"
        least, most = min(counts.values()), max(counts.values())
        rows = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        return f"{name} ({looked}{len(counts):,} classes of {rows} rows)"
    kind = str(target.dtype).removeprefix("torch.")
    return f"{name} ({kind}{f' of shape {tuple(target.shape[1:])}' if target.ndim > 1 else ''})"


def _counts(labels: torch.Tensor, classes: Sequence[str] | None) -> dict[Any, int] | None:
    values, counts = torch.unique(labels[labels != IGNORED], return_counts=True)
    known: dict[int, str] = dict(enumerate(classes or ()))
    return {known.get(value, value): count for value, count in zip(values.tolist(), counts.tolist(), strict=True)} or None


def _of_classes(counts: Mapping[Any, int], total: int, whole: bool) -> list[str]:
    rows = f"{total:,} rows" if whole else f"{total:,} rows looked at"
    if len(counts) == 1:
        return [f"All {rows} are of one class, {next(iter(counts))!r}: there is nothing to tell it from."]
    if not whole:
        return []
    found = []
    for name, count in counts.items():
        if count < HANDFUL and count * 20 < total / len(counts):
            alike = [other for other in counts if other != name and str(other).strip().lower() == str(name).strip().lower()]
            meant = f" Is it {alike[0]!r}, spelt otherwise?" if alike else " Is it a mistake, or too rare to be learned?"
            few = "1 row" if count == 1 else f"{count} rows"
            found.append(f"Class {name!r} has only {few} of {total:,}.{meant}")
    return found


def _of_scales(columns: Array, called: Sequence[str]) -> list[str]:
    """Whether the columns need scaling: 1 in 100 rows goes beyond what is taken for the size of a column."""
    if len(columns) < 2:
        return []
    sizes = np.quantile(np.abs(columns), 0.99, axis=0, method="higher")
    there = np.flatnonzero(sizes > 0)
    if not len(there):
        return []
    large, small = there[np.argmax(sizes[there])], there[np.argmin(sizes[there])]
    remedy = "Networks learn better from numbers of about the same size near 1: --transform standardise, or"
    remedy += " pg.Table(..., transforms=[pg.Standardise()])."
    if sizes[large] >= APART * sizes[small]:
        return [f"{called[large]} goes to {sizes[large]:.3g}, but {called[small].lower()} to {sizes[small]:.3g}. {remedy}"]
    if sizes[large] >= LARGE:
        return [f"{called[large]} goes to {sizes[large]:.3g}. {remedy}"]
    return []


def _of_one_feature(columns: Array, called: Sequence[str], labels: Array, seed: int) -> list[str]:
    """Whether one feature tells the label: a row is given that of the nearest row of the other half, in this feature alone."""
    if columns.shape[1] < 2 or len(columns) < FEWEST:
        return []
    order = np.random.default_rng((seed, 9)).permutation(len(columns))
    halves = order[: len(order) // 2], order[len(order) // 2 :]
    rarer = 1 - np.unique(labels, return_counts=True)[1].max() / len(labels)
    allowed = min(ALONE, 0.1 * rarer) * len(labels)
    for place, name in enumerate(called):
        values, wrong = columns[:, place], 0
        for known, asked in (halves, halves[::-1]):
            wrong += int((labels[_nearest(values, known, asked)] != labels[asked]).sum())
            if wrong > allowed:
                break
        if wrong <= allowed:
            right = 100 * (1 - wrong / len(labels))
            return [
                f"{name} alone predicts the label of {right:.4g} % of the rows. Does it hold the answer, or number the rows? "
                "Then leave it out (--exclude, pg.Table(..., exclude=[...]))."
            ]
    return []


def _nearest(values: Array, known: Array, asked: Array) -> Array:
    """For each row that is asked about, the known one whose value is nearest."""
    known = known[np.argsort(values[known], kind="stable")]
    there = values[known].astype(np.float64)
    mine = values[asked].astype(np.float64)
    right = np.clip(np.searchsorted(there, mine), 1, len(there) - 1)
    nearer = np.where(mine - there[right - 1] <= there[right] - mine, right - 1, right)
    found: Array = known[nearer]
    return found
