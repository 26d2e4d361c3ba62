"""The base class of transformations, which learn from columns of the training part and then change columns row by row."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np

from paragrad.config import options
from paragrad.errors import UsageError, unknown

Column: TypeAlias = np.ndarray[Any, Any]
"""One value per row, or one array of a fixed shape per row."""
Columns: TypeAlias = Mapping[str, Column]
Learned: TypeAlias = dict[str, Any]
"""Values that a transformation learned from one column, as JSON values."""


class Study(ABC):
    """An object that learns from one column of the training part, piece by piece."""

    @abstractmethod
    def add(self, values: Column) -> None:
        """Add the next rows."""

    def again(self) -> bool:
        """Return whether another pass over all rows is needed; called after each pass."""
        return False

    @abstractmethod
    def learned(self) -> Learned:
        """Return the learned values."""


@dataclass(frozen=True)
class Transform:
    """A change of some columns."""

    columns: tuple[str, ...] = ()
    """Names of columns, or globs such as jet_*; on the command line joined by +. By default all features."""

    def __post_init__(self) -> None:
        named = (self.columns,) if isinstance(self.columns, str) else tuple(self.columns)
        for name in named:
            if not isinstance(name, str):
                raise UsageError(f"columns={self.columns!r} of {self.name}, but columns must be given by name.")
        object.__setattr__(self, "columns", named)

    @property
    def name(self) -> str:
        """Name on the command line."""
        return type(self).__name__.lower()

    def spelled(self) -> str:
        """Return the text that ``parse`` turns into an equal transformation."""
        return options.describe(self)

    def chosen(self, available: Sequence[str], apart: Sequence[str] = ()) -> list[str]:
        """Return the available columns that it changes, in their order; those ``apart`` only if it names them."""
        features = [name for name in available if name not in apart]
        found: set[str] = set() if self.columns else set(features)
        for pattern in self.columns:
            # A name may contain brackets, which have another meaning in a pattern.
            fits = [pattern] if pattern in available else [name for name in features if fnmatchcase(name, pattern)]
            if not fits:
                raise unknown(f"column in transformation {self.spelled()!r}:", pattern, available)
            found.update(fits)
        return [name for name in available if name in found]

    def study(self, name: str, values: Column) -> Study | None:
        """Return an object that learns from a column whose first rows are ``values``; None if there is nothing to learn."""
        return None

    def notes(self, name: str, learned: Learned) -> list[str]:
        """Return notes for the user about the learned values."""
        return []

    def change(self, name: str, values: Column, learned: Learned, where: str) -> dict[str, Column]:
        """Return the columns that replace a column."""
        raise NotImplementedError

    def invert(self, values: Column, learned: Learned) -> Column:
        """Undo ``change``, as far as possible: clipped and filled-in values stay."""
        return values

    def apply(self, columns: Columns, chosen: Mapping[str, Learned], where: str) -> dict[str, Column]:
        """Return all columns in the same order, with the chosen ones changed."""
        made: dict[str, Column] = {}
        for name, values in columns.items():
            parts = self.change(name, values, chosen[name], where) if name in chosen else {name: values}
            for part, column in parts.items():
                if part in made or (part != name and part in columns):
                    raise UsageError(
                        f"{self.spelled()!r} makes a column {part!r} of {name!r}, but that name is taken: rename it."
                    )
                made[part] = column
        return made


def numbers(values: Column, name: str, user: str, where: str = "") -> Column:
    """Return a column as float64. Raise if it does not hold numbers."""
    values = np.asarray(values)
    if values.dtype.kind not in "biuf":
        kind = "text" if values.dtype.kind in "USOT" else str(values.dtype)
        raise UsageError(
            f"{place(name, where)} holds {kind}, but {user} needs numbers. Name the columns to apply it to "
            f"({user}:columns=...), or convert {name!r} to numbers first, by onehot:columns={name} or "
            f"labelindex:columns={name}."
        )
    return values.astype(np.float64)


def finite(values: Column, name: str, user: str, where: str = "") -> Column:
    """Return a column as float64. Raise if it holds NaN or infinity."""
    found = numbers(values, name, user, where)
    if not np.isfinite(found).all():
        row = int(np.argwhere(~np.isfinite(found))[0][0])
        raise UsageError(
            f"{place(name, where)} has {found[row] if found.ndim == 1 else 'NaN or infinity'} in row {row}, which {user} "
            "cannot use. Fill NaN in first, by the transformation missing; leave out rows with infinity."
        )
    return found


def wide(values: Column) -> Column:
    """Return a column with all numbers of a row in one dimension; there may be no rows."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def place(name: str, where: str) -> str:
    """Return the name of a column and of its file, for a message."""
    return f"Column {name!r} of {where}" if where else f"Column {name!r}"
