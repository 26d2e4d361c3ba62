"""Kinds as numbers: a column for each kind, or the number of the kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paragrad.data.transforms.statistics import Values
from paragrad.data.transforms.transform import Column, Learned, Study, Transform, place
from paragrad.errors import UsageError


@dataclass(frozen=True)
class _OfKinds(Transform):
    """What learns which values a column has."""

    most: int = 1000
    """How many values a column may have; more are taken for a mistake."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_most(self)

    def study(self, name: str, values: Column) -> Study:
        return _Kinds(name, self.name, self.most)


@dataclass(frozen=True)
class OneHot(_OfKinds):
    """A column COLUMN=VALUE of 0 and 1 for each value that the training part has, in their order."""

    def change(self, name: str, values: Column, learned: Learned, where: str) -> dict[str, Column]:
        index = _index(kinds(values, name, self.name, where), learned["values"], name, where)
        return {f"{name}={value}": (index == number).astype(np.float32) for number, value in enumerate(learned["values"])}


@dataclass(frozen=True)
class LabelIndex(_OfKinds):
    """The number of the value, from 0, in the order of those that the training part has."""

    def change(self, name: str, values: Column, learned: Learned, where: str) -> dict[str, Column]:
        return {name: _index(kinds(values, name, self.name, where), learned["values"], name, where)}


def kinds(values: Column, name: str, user: str, where: str = "") -> Column:
    """A column as text or numbers that can be sorted; one value in each row, none missing."""
    values = np.asarray(values)
    if values.ndim != 1:
        raise UsageError(f"{place(name, where)} has {values.shape[1:]} values in a row, but {user} takes one.")
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8")
    if values.dtype.kind == "T" or (values.dtype.kind == "O" and all(isinstance(value, str) for value in values)):
        values = values.astype(str) if len(values) else np.empty(0, dtype=str)
    if values.dtype.kind == "O" and len(values):
        row = next(row for row, value in enumerate(values) if not isinstance(value, str))
        raise UsageError(
            f"{place(name, where)} has {values[row]!r} in row {row}, but {user} takes text, or numbers of one type: fill it, "
            "or leave the row out."
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int((~np.isfinite(values)).argmax())
        raise UsageError(
            f"{place(name, where)} has {values[row]} in row {row}, which is no kind. NaN is filled before "
            f"by missing:columns={name},fill=-1."
        )
    if values.dtype.kind not in "UObiuf":
        raise UsageError(f"{place(name, where)} is of type {values.dtype}, but {user} takes text or numbers.")
    return values


class _Kinds:
    def __init__(self, name: str, user: str, most: int) -> None:
        self._about = (name, user)
        self._values = Values(name, user, most)

    def add(self, values: Column) -> None:
        if len(values):
            self._values.add(kinds(values, *self._about))

    def again(self) -> bool:
        return False

    def learned(self) -> Learned:
        seen = self._values.seen
        if len({isinstance(value, str) for value in seen}) > 1:
            raise UsageError(f"Column {self._about[0]!r} is text in some rows and numbers in others: write it in one way.")
        return {"values": sorted(seen)}


def _index(values: Column, known: Sequence[Any], name: str, where: str) -> Column:
    if not len(values):
        return np.empty(0, dtype=np.int64)
    if isinstance(known[0], str) != (values.dtype.kind == "U"):
        kinds_there = "text" if values.dtype.kind == "U" else "numbers"
        raise UsageError(f"{place(name, where)} holds {kinds_there}, but in the training part it is the other: write it alike.")
    table = np.asarray(known)
    index = np.minimum(np.searchsorted(table, values), len(table) - 1)
    unseen = table[index] != values
    if unseen.any():
        row = int(unseen.argmax())
        shown = ", ".join(repr(value) for value in known[:8]) + ", ..." * (len(known) > 8)
        raise UsageError(
            f"{place(name, where)} has {values[row].item()!r} in row {row}, which the training part does not have "
            f"(it has {shown}). Train with rows of that kind, or leave them out."
        )
    return index.astype(np.int64)


def _check_most(transform: _OfKinds) -> None:
    if transform.most < 1:
        raise UsageError(f"most={transform.most} of {transform.name}, but it is a number of values of at least 1.")
