"""What a transformation is: it may look at the columns of the training part, and then changes columns, rows one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeAlias

import numpy as np

from paragrad.config import options
from paragrad.errors import UsageError, unknown

Column: TypeAlias = np.ndarray[Any, Any]
"""One value for each row, or one array of a fixed shape."""
Columns: TypeAlias = Mapping[str, Column]
Learned: TypeAlias = dict[str, Any]
"""What a transformation has learned of one column, as JSON has it."""


class Study(Protocol):
    """What looks at one column of the training part, piece by piece."""

    def add(self, values: Column) -> None:
        """The next rows."""

    def again(self) -> bool:
        """Called after a pass over all rows: whether it must see them once more."""

    def learned(self) -> Learned:
        """What was learned."""


@dataclass(frozen=True)
class Transform:
    """One change of some columns."""

    columns: tuple[str, ...] = ()
    """Names of columns, or patterns as for names of files; on the command line joined by +. By default all features."""

    def __post_init__(self) -> None:
        named = (self.columns,) if isinstance(self.columns, str) else tuple(self.columns)
        for name in named:
            if not isinstance(name, str):
                raise UsageError(f"columns={self.columns!r} of {self.name}, but columns are given by their names.")
        object.__setattr__(self, "columns", named)

    @property
    def name(self) -> str:
        """As on the command line."""
        return type(self).__name__.lower()

    def spelled(self) -> str:
        """The text that ``parse`` turns into an equal transformation."""
        return options.describe(self)

    def chosen(self, there: Sequence[str], apart: Sequence[str] = ()) -> list[str]:
        """Which of the columns that are there it changes, in their order; those apart only where it names them."""
        features = [name for name in there if name not in apart]
        found: set[str] = set() if self.columns else set(features)
        for pattern in self.columns:
            # A name may have brackets in it, which a pattern would read otherwise.
            fits = [pattern] if pattern in there else [name for name in features if fnmatchcase(name, pattern)]
            if not fits:
                raise unknown(f"column in transformation {self.spelled()!r}:", pattern, there)
            found.update(fits)
        return [name for name in there if name in found]

    def study(self, name: str, values: Column) -> Study | None:
        """What learns from a column, of which ``values`` are the first rows; None where there is nothing to learn."""
        return None

    def notes(self, name: str, learned: Learned) -> list[str]:
        """What is to be said aloud of what was learned."""
        return []

    def change(self, name: str, values: Column, learned: Learned, where: str) -> dict[str, Column]:
        """What comes in a column's place."""
        raise NotImplementedError

    def invert(self, values: Column, learned: Learned) -> Column:
        """The values that ``change`` makes these of, as far as it can be undone: what it cuts off or fills in stays."""
        return values

    def apply(self, columns: Columns, chosen: Mapping[str, Learned], where: str) -> dict[str, Column]:
        """The columns with those that were chosen changed, in the same order."""
        made: dict[str, Column] = {}
        for name, values in columns.items():
            parts = self.change(name, values, chosen[name], where) if name in chosen else {name: values}
            for part, column in parts.items():
                if part in made or (part != name and part in columns):
                    raise UsageError(f"{self.spelled()!r} makes a column {part!r} of {name!r}, but there is one: rename it.")
                made[part] = column
        return made


def numbers(values: Column, name: str, user: str, where: str = "") -> Column:
    """A column as float64; text is refused."""
    values = np.asarray(values)
    if values.dtype.kind not in "biuf":
        kind = "text" if values.dtype.kind in "USOT" else str(values.dtype)
        raise UsageError(
            f"{place(name, where)} holds {kind}, but {user} needs numbers. Name the columns that it is meant for "
            f"({user}:columns=...), or turn {name!r} into numbers before it, by onehot:columns={name} or "
            f"labelindex:columns={name}."
        )
    return values.astype(np.float64)


def finite(values: Column, name: str, user: str, where: str = "") -> Column:
    """A column as float64, all of whose values are numbers indeed."""
    found = numbers(values, name, user, where)
    if not np.isfinite(found).all():
        row = int(np.argwhere(~np.isfinite(found))[0][0])
        raise UsageError(
            f"{place(name, where)} has {found[row] if found.ndim == 1 else 'NaN or infinity'} in row {row}, which {user} "
            "cannot use. NaN is filled by a transformation missing before it; leave out rows with infinity."
        )
    return found


def wide(values: Column) -> Column:
    """All numbers of a row side by side; there may be no rows."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def place(name: str, where: str) -> str:
    """A column and where it was read, for a message."""
    return f"Column {name!r} of {where}" if where else f"Column {name!r}"
