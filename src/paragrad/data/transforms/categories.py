"""Categories as numbers: one column of 0 and 1 per category, or the number of the category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paragrad.data.transforms.transform import Column, Learned, Study, Transform, place
from paragrad.errors import UsageError


@dataclass(frozen=True)
class _Categorical(Transform):
    """A transformation that learns the distinct values of a column."""

    most: int = 1000
    """Largest number of distinct values of a column; more are taken for a mistake."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most < 1:
            raise UsageError(f"most={self.most} of {self.name}, but it must be at least 1.")

    def study(self, name: str, values: Column) -> Study:
        return _Values(name, self.name, self.most)


@dataclass(frozen=True)
class OneHot(_Categorical):
    """A column COLUMN=VALUE of 0 and 1 for each value that the training part has, in sorted order."""

    def change(self, name: str, values: Column, learned: Learned, where: str) -> dict[str, Column]:
        index = _index(_categories(values, name, self.name, where), learned["values"], name, where)
        return {f"{name}={value}": (index == number).astype(np.float32) for number, value in enumerate(learned["values"])}


@dataclass(frozen=True)
class LabelIndex(_Categorical):
    """The number of the value, from 0, among the sorted values that the training part has."""

    def change(self, name: str, values: Column, learned: Learned, where: str) -> dict[str, Column]:
        return {name: _index(_categories(values, name, self.name, where), learned["values"], name, where)}


def _categories(values: Column, name: str, user: str, where: str = "") -> Column:
    """Return a column as text or numbers that can be sorted, with one value per row and none missing."""
    values = np.asarray(values)
    if values.ndim != 1:
        raise UsageError(f"{place(name, where)} has {values.shape[1:]} values in a row, but {user} needs one.")
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8")
    if values.dtype.kind == "T" or (values.dtype.kind == "O" and all(isinstance(value, str) for value in values)):
        values = values.astype(str) if len(values) else np.empty(0, dtype=str)
    if values.dtype.kind == "O" and len(values):
        row = next(row for row, value in enumerate(values) if not isinstance(value, str))
        raise UsageError(
            f"{place(name, where)} has {values[row]!r} in row {row}, but {user} needs text, or numbers of one type: fill it, "
            "or leave the row out."
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int((~np.isfinite(values)).argmax())
        raise UsageError(
            f"{place(name, where)} has {values[row]} in row {row}, which is not a category. Fill NaN in before, by "
            f"missing:columns={name},fill=-1."
        )
    if values.dtype.kind not in "UObiuf":
        raise UsageError(f"{place(name, where)} is of type {values.dtype}, but {user} needs text or numbers.")
    return values


class _Values(Study):
    """The distinct values of a column."""

    def __init__(self, name: str, user: str, most: int) -> None:
        self._name, self._user, self._most = name, user, most
        self._found: set[Any] = set()

    def add(self, values: Column) -> None:
        if not len(values):
            return
        self._found.update(np.unique(_categories(values, self._name, self._user)).tolist())
        if len(self._found) > self._most:
            raise UsageError(
                f"Column {self._name!r} has more than {self._most:,} different values, too many categories for {self._user}. "
                f"Name the columns to apply it to ({self._user}:columns=...), or allow more ({self._user}:most=...)."
            )

    def learned(self) -> Learned:
        if len({isinstance(value, str) for value in self._found}) > 1:
            raise UsageError(f"Column {self._name!r} is text in some rows and numbers in others: use one of them.")
        return {"values": sorted(self._found)}


def _index(values: Column, known: Sequence[Any], name: str, where: str) -> Column:
    if not len(values):
        return np.empty(0, dtype=np.int64)
    is_text = values.dtype.kind == "U"
    if isinstance(known[0], str) != is_text:
        here, there = ("text", "numbers") if is_text else ("numbers", "text")
        raise UsageError(f"{place(name, where)} holds {here}, but in the training part it holds {there}: use the same.")
    table = np.asarray(known)
    index = np.minimum(np.searchsorted(table, values), len(table) - 1)
    unseen = table[index] != values
    if unseen.any():
        row = int(unseen.argmax())
        shown = ", ".join(repr(value) for value in known[:8]) + ", ..." * (len(known) > 8)
        raise UsageError(
            f"{place(name, where)} has {values[row].item()!r} in row {row}, which the training part does not have "
            f"(it has {shown}). Train with such rows, or leave them out."
        )
    return index.astype(np.int64)
