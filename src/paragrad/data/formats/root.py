"""ROOT: a TTree or an RNTuple; a piece is a range of entries that ends where the file's own baskets or clusters do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from paragrad.config.extras import command
from paragrad.data.formats.file import TEXT, Array, Column, Handle, Jagged, even, gathered, refuse, rows_of_a_piece
from paragrad.errors import UsageError, unknown

TREES = ("TTree", "TNtuple", "TNtupleD", "TChain", "ROOT::RNTuple")
TOO_LONG = 4
"""So many times the usual length a range without a common end may be; longer ones are cut anywhere."""


def open_file(path: Path, tree: str | None) -> Root:
    """A tree of a ROOT file."""
    return Root(path, tree)


class Root:
    """One TTree or RNTuple of a ROOT file."""

    def __init__(self, path: Path, tree: str | None) -> None:
        self.name = str(path)
        self._handle = Handle(partial(_open, self.name))
        self._tree = self._choose(tree)
        self.columns: dict[str, Column] = {}
        self.aside: dict[str, str] = {}
        self.index: tuple[str, ...] = ()
        try:
            self._look()
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            refuse(self.name, "ROOT", error)

    def read(self, piece: int, names: Sequence[str]) -> dict[str, Array | Jagged]:
        """Some columns of a piece."""
        start = sum(self.lengths[:piece])
        try:
            tree = self._handle.get()[self._tree]
            found = tree.arrays(list(names), entry_start=start, entry_stop=start + self.lengths[piece], library="ak")
            return {name: _array(found[name], self.columns[name]) for name in names}
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            refuse(self.name, "ROOT", error)

    def close(self) -> None:
        """Let go of the file."""
        self._handle.close()

    def _choose(self, tree: str | None) -> str:
        kinds = self._handle.get().classnames(recursive=True, cycle=False)
        trees = [name for name, kind in kinds.items() if kind in TREES]
        if not trees:
            there = ", ".join(f"{name} ({kind})" for name, kind in kinds.items()) or "nothing at all"
            raise UsageError(f"{self.name} has no TTree and no RNTuple, so there are no rows in it. It has: {there}.")
        if tree is None and len(trees) > 1:
            raise UsageError(
                f"{self.name} has several trees: {', '.join(trees)}. Say which one: --tree {trees[0]}, or "
                f"pg.Table(..., tree={trees[0]!r})."
            )
        if tree is not None and tree not in trees:
            raise unknown(f"tree in {self.name}:", tree, trees)
        return trees[0] if tree is None else tree

    def _branches(self, tree: Any) -> list[str]:
        """The branches of a TTree that hold values, by the names that people know them by: Jet.PT, not Jet/Jet.PT."""
        found = []
        for branch in tree.itervalues(recursive=True):
            if type(branch.interpretation).__name__ == "UnknownInterpretation":
                self.aside[branch.name] = f"it is of type {branch.typename}"
            elif not branch.branches:
                found.append(branch.name)
        return found

    def _look(self) -> None:
        tree = self._handle.get()[self._tree]
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


def _open(name: str) -> Any:
    try:
        import awkward  # noqa: F401
        import uproot
    except ImportError:
        raise UsageError(f"{name} is read by uproot and awkward, of which one is missing: {command('root')}") from None
    try:
        return uproot.open(name, handler=uproot.source.file.MemmapSource)
    except (OSError, ValueError, KeyError, AssertionError) as error:
        refuse(name, "ROOT", error)


def _column(form: Any) -> Column | None:
    """awkward's form of a branch as a column."""
    kind = type(form).__name__
    if kind == "NumpyForm":
        return (
            Column(np.dtype(form.primitive), tuple(form.inner_shape))
            if form.primitive not in ("datetime64", "timedelta64")
            else None
        )
    if form.parameter("__array__") == "string":
        return Column(TEXT)
    if kind in ("RegularForm", "ListOffsetForm", "ListForm"):
        inner = _column(form.content)
        if inner is None or inner.jagged or inner.dtype == TEXT:
            return None
        if kind == "RegularForm":
            return Column(inner.dtype, (form.size, *inner.shape))
        return None if inner.shape else Column(inner.dtype, jagged=True)
    return None


def _array(values: Any, column: Column) -> Array | Jagged:
    if column.jagged:
        starts = np.asarray(values.layout.starts.data)
        counts = np.asarray(values.layout.stops.data) - starts
        return Jagged(np.asarray(values.layout.to_packed().content.data), counts.astype(np.int64))
    if column.dtype == TEXT:
        return np.array(values.to_list(), dtype=object)
    return np.asarray(values.to_numpy(allow_missing=False), dtype=column.dtype)
