"""What pandas writes into HDF5 (``to_hdf``): which columns of which datasets a frame is made of, and which are its index."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

from paragrad.errors import UsageError

KINDS = ("frame_table", "frame")
"""What pandas calls format="table" and format="fixed"."""


@dataclass(frozen=True)
class Place:
    """Where the values of a column are: a dataset, a field of its compound type, a position in each row."""

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
    """The frame in a file or a group of it; None where pandas has written none."""
    found: list[tuple[str, Any]] = [("", root)] if _kind(root) in KINDS else []

    def look(place: str, thing: Any) -> None:
        if _kind(thing) in KINDS:
            found.append((f"{place}/", thing))

    if hasattr(root, "visititems"):
        root.visititems(look)
    if len(found) > 1:
        names = [place.rstrip("/") for place, _ in found]
        raise UsageError(
            f"{name} holds several frames of pandas: {', '.join(names)}. Say which one: --tree {names[0]}, or "
            f"pg.Table(..., tree={names[0]!r})."
        )
    if not found:
        return None
    place, group = found[0]
    return _table(place, group) if _kind(group) == KINDS[0] else _fixed(place, group)


def _kind(thing: Any) -> str:
    return _text(thing.attrs.get("pandas_type", b"")) if hasattr(thing, "keys") else ""


def _table(place: str, group: Any) -> Stored:
    """Rows of one compound type: a field for each column, or one for all columns of a type."""
    table = group["table"]
    index = tuple(str(field) for _, field in _plain(group.attrs["index_cols"]))
    columns: dict[str, Place] = {}
    for field in table.dtype.names:
        inner = table.dtype[field].shape
        if not inner:
            columns[field] = Place(f"{place}table", field)
            continue
        for position, column in enumerate(_plain(table.attrs[f"{field}_kind"])):
            columns[str(column)] = Place(f"{place}table", field, position)
    return Stored(columns, index, {})


def _fixed(place: str, group: Any) -> Stored:
    """A matrix for all columns of a type; text is pickled, which is not read."""
    columns = {"index": Place(f"{place}axis1")} if "axis1" in group else {}
    aside: dict[str, str] = {}
    for block in range(int(group.attrs["nblocks"])):
        values = f"block{block}_values"
        for position, column in enumerate(group[f"block{block}_items"][()]):
            if group[values].ndim == 2:
                columns[_text(column)] = Place(place + values, None, position)
            else:
                aside[_text(column)] = "pandas has pickled it: write the frame with format='table'"
    order = [_text(column) for column in group["axis0"][()]]
    columns = {name: columns[name] for name in ("index", *order) if name in columns}
    return Stored(columns, ("index",), aside)


class _Plain(pickle.Unpickler):
    """Lists and text alone: what is named in a file is never imported."""

    def find_class(self, module: str, name: str) -> Any:
        raise UsageError(f"The columns of a pandas frame are named by {module}.{name}, which is not read: name them by text.")


def _plain(value: Any) -> list[Any]:
    found: list[Any] = _Plain(io.BytesIO(bytes(value))).load()
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
