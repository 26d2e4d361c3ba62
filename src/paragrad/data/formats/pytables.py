"""Frames that pandas wrote into HDF5 (``to_hdf``): the datasets of their columns, and the columns of their index."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

from paragrad.errors import UsageError

KINDS = ("frame_table", "frame")
"""Names that pandas gives to format="table" and format="fixed"."""


@dataclass(frozen=True)
class Place:
    """Location of the values of a column: a dataset, a field of its compound type, a position in each row."""

    dataset: str
    field: str | None = None
    position: int | None = None


@dataclass(frozen=True)
class Stored:
    """A frame in a file."""

    columns: dict[str, Place]
    index: tuple[str, ...]
    aside: dict[str, str]


def frame_in(root: Any, name: str) -> Stored | None:
    """Return the frame in a file or in one of its groups; None if pandas wrote none."""
    found: list[tuple[str, Any]] = [("", root)] if _kind(root) in KINDS else []

    def visit(place: str, thing: Any) -> None:
        if _kind(thing) in KINDS:
            found.append((f"{place}/", thing))

    if hasattr(root, "visititems"):
        root.visititems(visit)
    if len(found) > 1:
        names = [place.rstrip("/") for place, _ in found]
        raise UsageError(
            f"{name} holds several pandas frames: {', '.join(names)}. Choose one: --tree {names[0]}, or "
            f"pg.Table(..., tree={names[0]!r})."
        )
    if not found:
        return None
    place, group = found[0]
    return _table(place, group) if _kind(group) == KINDS[0] else _fixed(place, group)


def _kind(thing: Any) -> str:
    return _text(thing.attrs.get("pandas_type", b"")) if hasattr(thing, "keys") else ""


def _table(place: str, group: Any) -> Stored:
    """Return a frame stored as rows of a compound type, with a field per column or one for all columns of a type."""
    table = group["table"]
    index = tuple(str(field) for _, field in _plain(group.attrs["index_cols"]))
    columns: dict[str, Place] = {}
    for field in table.dtype.names:
        if not table.dtype[field].shape:
            columns[field] = Place(f"{place}table", field)
            continue
        for position, column in enumerate(_plain(table.attrs[f"{field}_kind"])):
            columns[str(column)] = Place(f"{place}table", field, position)
    return Stored(columns, index, {})


def _fixed(place: str, group: Any) -> Stored:
    """Return a frame stored as one matrix for all columns of a type. Text is pickled and not read."""
    columns = {"index": Place(f"{place}axis1")} if "axis1" in group else {}
    aside: dict[str, str] = {}
    for block in range(int(group.attrs["nblocks"])):
        values = f"block{block}_values"
        for position, column in enumerate(group[f"block{block}_items"][()]):
            if group[values].ndim == 2:
                columns[_text(column)] = Place(place + values, None, position)
            else:
                aside[_text(column)] = "pandas pickled it: write the frame with format='table'"
    order = [_text(column) for column in group["axis0"][()]]
    columns = {name: columns[name] for name in ("index", *order) if name in columns}
    return Stored(columns, ("index",), aside)


class _Plain(pickle.Unpickler):
    """Reads lists and text only: nothing that a file names is imported."""

    def find_class(self, module: str, name: str) -> Any:
        raise UsageError(f"The columns of a pandas frame are named by {module}.{name}, which is not read: use text as names.")


def _plain(value: Any) -> list[Any]:
    return list(_Plain(io.BytesIO(bytes(value))).load())


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
