"""A description of rows before training (features, label and classes), and warnings about likely mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paragrad.data.formats.file import Array
from paragrad.data.generated import Generated
from paragrad.data.opened import Opened
from paragrad.data.source import IGNORED, Arrays, Items, Source, Weighted, find_target, is_whole, joined, leaves, target_of
from paragrad.data.stream import Streamed

SAMPLED = 4_096
"""Largest number of rows in the sample."""
VALUES = 4_000_000
"""Largest number of values in the sample: it has fewer rows if they are wide."""
DATASET_ROWS = 512
"""Rows of a Dataset in the sample: each may have to be decoded."""
PIECES = 8
"""Pieces of a streamed table in the sample."""
LISTED, SHOWN = 12, 5
"""Up to ``LISTED`` names are listed. Of more, the first ``SHOWN`` and the last are."""
RARE = 10
"""A class with fewer rows may be a mistake if the others have far more."""
FEWEST = 100
"""Least number of rows to decide whether one feature alone predicts the label."""
ALONE = 0.02
"""Largest share of wrong rows with which a feature predicts the label alone; at most a tenth of that of the rarer classes."""
SCALE_RATIO = 1_000
"""Ratio of the sizes of two columns from which on they need scaling."""
LARGE = 100
"""Size of a column from which on it needs scaling."""


@dataclass(frozen=True)
class Overview:
    """A note that describes the rows, and warnings."""

    note: str
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Sample:
    """Some of the rows, and labels if they are classes."""

    tree: Any
    labels: torch.Tensor | None
    whole: bool
    """True if the labels are those of all rows."""


def look(source: Source, seed: int, *, opened: Opened | None = None, classes: Sequence[str] | None = None) -> Overview | None:
    """Return a description of the rows of a source, and warnings; None if they cannot be described."""
    sample = _sample(source, seed)
    if sample is None or not all(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in leaves(sample.tree)):
        return None
    names = None if opened is None else opened.names
    rows = sample.tree.rows if isinstance(sample.tree, Weighted) else sample.tree
    inputs = _inputs(rows)
    counts = None if opened is None else opened.counts
    if counts is None and sample.labels is not None:
        counts = _counts(sample.labels, classes)
    target = None if inputs is rows else leaves(target_of(rows))[-1]
    uneven = isinstance(source, Items) and not source.even
    note = "Inputs as collate makes them" if uneven else _describe_features(inputs, names)
    if target is not None:
        note += f"; {_describe_label(target, counts, opened, sample.whole)}"
    if opened is not None and opened.weight is not None:
        note += f"; weight: {opened.weight}"
    warnings: list[str] = []
    if counts is not None:
        warnings += _check_classes(counts, sample.whole or opened is not None)
    columns, called = (None, []) if uneven else _columns(inputs, names)
    if columns is not None:
        warnings += _check_scales(columns, called)
        if counts is not None and len(counts) > 1 and target is not None:
            warnings += _check_features(columns, called, np.asarray(target), seed)
    return Overview(f"{note}.", tuple(warnings))


def _sample(source: Source, seed: int) -> _Sample | None:
    draw = np.random.default_rng((seed, 8))
    if isinstance(source, Arrays):
        rows = np.sort(draw.permutation(len(source))[: _most(source.tree)])
        return _Sample(source.batch(rows), _class_labels(source.tree), True)
    if isinstance(source, Items):
        rows = np.sort(draw.permutation(len(source))[:DATASET_ROWS])
        tree = source.batch(rows)
        if not all(isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == len(rows) for leaf in leaves(tree)):
            return None
        return _Sample(tree, _class_labels(tree), len(rows) == len(source))
    if isinstance(source, Streamed):
        filled = np.flatnonzero(source.lengths)
        # Only one piece is read by user code, which may be slow.
        most = PIECES if isinstance(source.pieces, Opened) else 1
        chosen = filled[np.linspace(0, len(filled) - 1, min(most, len(filled))).round().astype(np.int64)]
        trees = []
        for piece in np.unique(chosen).tolist():
            part = Arrays(source.load(piece))
            room = max(1, _most(part.tree) // len(chosen))
            trees.append(part.batch(np.sort(draw.permutation(len(part))[:room])))
        return _Sample(joined(trees), None, False)
    if isinstance(source, Generated):
        return _Sample(source.sample, None, False)
    return None


def _most(tree: Any) -> int:
    width = sum(leaf[:1].numel() for leaf in leaves(tree))
    return max(1, min(SAMPLED, VALUES // max(1, width)))


def _class_labels(tree: Any) -> torch.Tensor | None:
    """Return the labels if each row has one whole number."""
    rows = tree.rows if isinstance(tree, Weighted) else tree
    if _inputs(rows) is rows:
        return None
    found = leaves(target_of(rows))
    if len(found) > 1 or not isinstance(found[0], torch.Tensor):
        return None
    return found[0] if found[0].ndim == 1 and is_whole(found[0]) else None


def _inputs(tree: Any) -> Any:
    """Return the inputs of a model; the tree itself if it has no separate target."""
    if isinstance(tree, Mapping):
        key = find_target(tree)
        return tree if key is None else {name: value for name, value in tree.items() if name != key}
    if isinstance(tree, tuple | list) and len(tree) > 1:
        return tree[0] if len(tree) == 2 else tuple(tree[:-1])
    return tree


def _columns(inputs: Any, names: Sequence[str] | None) -> tuple[Array | None, list[str]]:
    """Return the numbers of each row in one dimension, with a name for each; None if there are several inputs, or no floats."""
    found = leaves(inputs)
    if len(found) != 1 or not found[0].is_floating_point() or (found[0].ndim < 2 and names is None):
        return None, []
    values = found[0].reshape(len(found[0]), -1).float().numpy()
    if names is not None and len(names) == values.shape[1]:
        return values, [f"Column {name!r}" for name in names]
    shape = tuple(found[0].shape[1:])
    places = [place if len(shape) > 1 else place[0] for place in np.ndindex(*shape)] if shape else [0]
    return values, [f"Input {place}" for place in places]


def _describe_features(inputs: Any, names: Sequence[str] | None) -> str:
    if names is not None:
        listed = list(names) if len(names) <= LISTED else [*names[:SHOWN], "...", names[-1]]
        return f"Features ({len(names)}): {', '.join(listed)}"
    shapes = [tuple(leaf.shape[1:]) for leaf in leaves(inputs)]
    if len(shapes) > 1:
        return f"Inputs: {' and '.join(map(str, shapes))} in each row"
    return f"Features ({shapes[0][0]})" if len(shapes[0]) == 1 else f"Features of shape {shapes[0]}"


def _describe_label(target: torch.Tensor, counts: Mapping[Any, int] | None, opened: Opened | None, whole: bool) -> str:
    name = "label" if opened is None or opened.label is None else f"label: {opened.label}"
    if counts is None:
        kind = str(target.dtype).removeprefix("torch.")
        return f"{name} ({kind}{f' of shape {tuple(target.shape[1:])}' if target.ndim > 1 else ''})"
    looked = "" if whole or opened is not None else f"of {sum(counts.values()):,} rows looked at: "
    if len(counts) <= LISTED:
        return f"{name} ({looked}{', '.join(f'{key} {counts[key]:,}' for key in sorted(counts))})"
    least, most = min(counts.values()), max(counts.values())
    rows = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{name} ({looked}{len(counts):,} classes of {rows} rows)"


def _counts(labels: torch.Tensor, classes: Sequence[str] | None) -> dict[Any, int] | None:
    values, counts = torch.unique(labels[labels != IGNORED], return_counts=True)
    known: dict[int, str] = dict(enumerate(classes or ()))
    return {known.get(value, value): count for value, count in zip(values.tolist(), counts.tolist(), strict=True)} or None


def _check_classes(counts: Mapping[Any, int], whole: bool) -> list[str]:
    total = sum(counts.values())
    if len(counts) == 1:
        rows = f"{total:,} rows" if whole else f"{total:,} rows looked at"
        return [f"All {rows} are of one class, {next(iter(counts))!r}: there is nothing to distinguish it from."]
    if not whole:
        return []
    found = []
    for name, count in counts.items():
        if count < RARE and count * 20 < total / len(counts):
            alike = [other for other in counts if other != name and str(other).strip().lower() == str(name).strip().lower()]
            meant = f" Is it {alike[0]!r}, spelt otherwise?" if alike else " Is it a mistake, or too rare to be learned?"
            few = "1 row" if count == 1 else f"{count} rows"
            found.append(f"Class {name!r} has only {few} of {total:,}.{meant}")
    return found


def _check_scales(columns: Array, called: Sequence[str]) -> list[str]:
    """Warn if columns need scaling. The size of a column is the 99 % quantile of its absolute values."""
    if len(columns) < 2:
        return []
    sizes = np.quantile(np.abs(columns), 0.99, axis=0, method="higher")
    nonzero = np.flatnonzero(sizes > 0)
    if not len(nonzero):
        return []
    large, small = nonzero[np.argmax(sizes[nonzero])], nonzero[np.argmin(sizes[nonzero])]
    if sizes[large] >= SCALE_RATIO * sizes[small]:
        found = f"{called[large]} goes to {sizes[large]:.3g}, but {called[small].lower()} to {sizes[small]:.3g}."
    elif sizes[large] >= LARGE:
        found = f"{called[large]} goes to {sizes[large]:.3g}."
    else:
        return []
    return [
        f"{found} Networks learn better from numbers of about the same size near 1: --transform standardise, or "
        "pg.Table(..., transforms=[pg.Standardise()])."
    ]


def _check_features(columns: Array, called: Sequence[str], labels: Array, seed: int) -> list[str]:
    """Warn if one feature predicts the label: each row gets the label of the row in the other half with the nearest value."""
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
                f"{name} alone predicts the label of {right:.4g} % of the rows. Does it contain the answer, or number the "
                "rows? Then leave it out (--exclude, pg.Table(..., exclude=[...]))."
            ]
    return []


def _nearest(values: Array, known: Array, asked: Array) -> Array:
    """Return, for each row in ``asked``, the row in ``known`` whose value is nearest."""
    known = known[np.argsort(values[known], kind="stable")]
    ordered = values[known].astype(np.float64)
    mine = values[asked].astype(np.float64)
    right = np.clip(np.searchsorted(ordered, mine), 1, len(ordered) - 1)
    nearer = np.where(mine - ordered[right - 1] <= ordered[right] - mine, right - 1, right)
    return known[nearer]
