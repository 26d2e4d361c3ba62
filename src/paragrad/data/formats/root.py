"""ROOT: a TTree or an RNTuple. A piece is a range of entries that ends at a boundary of the file's baskets or clusters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from paragrad.config.extras import command
from paragrad.data.formats.file import TEXT, Array, Column, File, Jagged, even, gathered, refuse, rows_of_a_piece
from paragrad.errors import UsageError, unknown

TREES = ("TTree", "TNtuple", "TNtupleD", "TChain", "ROOT::RNTuple")
TOO_LONG = 4
"""A range is cut anywhere if it is longer than this many pieces of the usual size."""


class Root(File):
    """One TTree or RNTuple of a ROOT file."""

    def __init__(self, path: Path, tree: str | None) -> None:
        super().__init__(str(path))
        self._tree = self._choose(tree)
        try:
            self._inspect()
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            refuse(self.name, "ROOT", error)

    def read(self, piece: int, names: Sequence[str]) -> dict[str, Array | Jagged]:
        start = sum(self.lengths[:piece])
        try:
            tree = self._file()[self._tree]
            found = tree.arrays(list(names), entry_start=start, entry_stop=start + self.lengths[piece], library="ak")
            return {name: _array(found[name], self.columns[name]) for name in names}
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            refuse(self.name, "ROOT", error)

    def _open(self) -> Any:
        try:
            import awkward  # noqa: F401
            import uproot
        except ImportError:
            raise UsageError(f"uproot or awkward, which read {self.name}, is not installed: {command('root')}") from None
        try:
            return uproot.open(self.name, handler=uproot.source.file.MemmapSource)
        except (OSError, ValueError, KeyError, AssertionError) as error:
            refuse(self.name, "ROOT", error)

    def _choose(self, tree: str | None) -> str:
        kinds = self._file().classnames(recursive=True, cycle=False)
        trees = [name for name, kind in kinds.items() if kind in TREES]
        if not trees:
            contents = ", ".join(f"{name} ({kind})" for name, kind in kinds.items()) or "nothing at all"
            raise UsageError(f"{self.name} has no TTree and no RNTuple, so it has no rows. It has: {contents}.")
        if tree is None and len(trees) > 1:
            raise UsageError(
                f"{self.name} has several trees: {', '.join(trees)}. Choose one: --tree {trees[0]}, or "
                f"pg.Table(..., tree={trees[0]!r})."
            )
        if tree is not None and tree not in trees:
            raise unknown(f"tree in {self.name}:", tree, trees)
        return trees[0] if tree is None else tree

    def _branches(self, tree: Any) -> list[str]:
        """Return the branches of a TTree that hold values, by their common names: Jet.PT, not Jet/Jet.PT."""
        found = []
        for branch in tree.itervalues(recursive=True):
            if type(branch.interpretation).__name__ == "UnknownInterpretation":
                self.aside[branch.name] = f"it is of type {branch.typename}"
            elif not branch.branches:
                found.append(branch.name)
        return found

    def _inspect(self) -> None:
        tree = self._file()[self._tree]
        clustered = hasattr(tree, "cluster_summaries")
        for name in tree.keys(recursive=False) if clustered else self._branches(tree):
            column = _column(tree.arrays([name], entry_start=0, entry_stop=0, library="ak")[name].layout.form)
            if column is None:
                self.aside[name] = "it holds neither numbers, nor text, nor lists of numbers"
            else:
                self.columns[name] = column
        size = rows_of_a_piece(self.columns.values())
        if clustered:
            ranges = [cluster.num_entries for cluster in tree.cluster_summaries]
        else:
            ranges = [stop - start for start, stop in pairwise(tree.common_entry_offsets())]
        ranges = [part for length in ranges for part in (even(length, size) if length > TOO_LONG * size else (length,))]
        if sum(ranges) != tree.num_entries:
            ranges = list(even(tree.num_entries, size))
        self.lengths = tuple(sum(ranges[place] for place in group) for group in gathered(ranges, size))


def _column(form: Any) -> Column | None:
    """Return awkward's form of a branch as a column; None if it is not a number, text or a list of numbers."""
    kind = type(form).__name__
    if kind == "NumpyForm":
        is_time = form.primitive in ("datetime64", "timedelta64")
        return None if is_time else Column(np.dtype(form.primitive), tuple(form.inner_shape))
    if form.parameter("__array__") == "string":
        return Column(TEXT)
    inner = _column(form.content) if kind in ("RegularForm", "ListOffsetForm", "ListForm") else None
    if inner is None or inner.jagged or inner.dtype == TEXT:
        return None
    if kind == "RegularForm":
        return Column(inner.dtype, (form.size, *inner.shape))
    return None if inner.shape else Column(inner.dtype, jagged=True)


def _array(values: Any, column: Column) -> Array | Jagged:
    if column.jagged:
        starts = np.asarray(values.layout.starts.data)
        counts = np.asarray(values.layout.stops.data) - starts
        return Jagged(np.asarray(values.layout.to_packed().content.data), counts.astype(np.int64))
    if column.dtype == TEXT:
        return np.array(values.to_list(), dtype=object)
    return np.asarray(values.to_numpy(allow_missing=False), dtype=column.dtype)
