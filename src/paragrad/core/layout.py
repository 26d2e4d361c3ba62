"""The layout of commits and replies in shared memory, on a wire and in the record.

Each field of ``Commit`` and ``Reply`` declares its kind (type and range) in its annotation in types.py. The functions here
read those declarations. Fields without a kind are tensors, and each transport moves them in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, TypeAlias, get_type_hints

import numpy as np
import torch

LARGEST = 1 << 62
"""Upper limit of whole numbers in commits and replies."""


def same(value: Any) -> Any:
    """Return the value unchanged, as the record shows it."""
    return value


def never(value: Any, whole: Any) -> bool:
    """Never omit a field from the record."""
    return False


def is_absent(value: Any, whole: Any) -> bool:
    """Omit a field from the record if it is None, NaN or an empty tuple."""
    return value is None or value == () or value != value


Omits: TypeAlias = Callable[[Any, Any], bool]
"""Called with a value and the whole object. Returns whether the record omits the field."""


@dataclass(frozen=True)
class Kind:
    """The kind of one field: its type, its range, and its form in the record."""

    code: str
    """NumPy code of one value: i8, f8, or ? for a flag."""
    least: float = -math.inf
    most: float = math.inf
    length: str = "one"
    """"one" value, "optional" (None is possible), "many" (a tuple) or "points" (a pair of equally long tuples, or None)."""
    omits: Omits | None = None
    """None: the field is not recorded."""
    shown: Callable[[Any], Any] = same
    """Converts the value for the record."""
    stamped: bool = False
    """True if the center sets the field, whatever a worker sends."""


def whole(*, least: int = 0, optional: bool = False, omits: Omits | None = None, stamped: bool = False) -> Kind:
    """Return the kind of a whole number; ``optional``: or None."""
    return Kind("i8", least, LARGEST, "optional" if optional else "one", omits, stamped=stamped)


def real(*, least: float = -math.inf, omits: Omits | None = None, shown: Callable[[Any], Any] = same) -> Kind:
    """Return the kind of a number: finite if ``least`` is given, otherwise also NaN or infinity."""
    return Kind("f8", least, math.inf if least == -math.inf else 1e300, "one", omits, shown)


def flag() -> Kind:
    """Return the kind of a boolean."""
    return Kind("?")


def wholes(*, omits: Omits | None = None, shown: Callable[[Any], Any] = list) -> Kind:
    """Return the kind of a tuple of whole numbers."""
    return Kind("i8", 0, LARGEST, "many", omits, shown)


def points() -> Kind:
    """Return the kind of two points of a small model's parameter space, or None."""
    return Kind("f8", length="points", omits=is_absent, shown=_plain)


def figure(value: float) -> float | None:
    """Return a number with six significant digits; None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def rounded(value: float) -> float | None:
    """Return a number with six decimals; None if it is not finite."""
    return round(value, 6) if math.isfinite(value) else None


class Layout:
    """The numbers and lists of one dataclass, in the order of their declaration."""

    def __init__(self, cls: type[Any]) -> None:
        hints = get_type_hints(cls, include_extras=True)
        marks = ((name, mark) for name, hint in hints.items() for mark in getattr(hint, "__metadata__", ()))
        kinds: dict[str, Kind] = {name: mark for name, mark in marks if isinstance(mark, Kind)}
        self.numbers: dict[str, Kind] = {name: kind for name, kind in kinds.items() if kind.length in ("one", "optional")}
        self.lists: dict[str, Kind] = {name: kind for name, kind in kinds.items() if name not in self.numbers}
        self.stamped = {one.name: one.default for one in fields(cls) if one.name in kinds and kinds[one.name].stamped}
        """Fields that the center sets, with their default values."""
        self.dtype = np.dtype([(name, kind.code) for name, kind in self.numbers.items()])
        recorded = [(name, kind) for name, kind in kinds.items() if kind.omits is not None]
        # Thousands of commits per second are recorded: one call fetches all fields that need no conversion.
        self._exact = [name for name, kind in recorded if kind.omits is never and kind.shown is same]
        self._get_exact = attrgetter(*self._exact) if len(self._exact) > 1 else None
        self._other = [(name, kind.omits, kind.shown) for name, kind in recorded if name not in self._exact]

    def header(self, thing: Any) -> dict[str, Any]:
        """Return the numbers and lists of an object or of a row, in types that JSON has."""
        if isinstance(thing, Row):
            return {name: _plain(value) for name, value in thing.get().items()}
        return {name: _plain(getattr(thing, name)) for name in (*self.numbers, *self.lists)}

    def read(self, header: Mapping[str, Any], most: Mapping[str, int]) -> dict[str, Any]:
        """Return the numbers and lists of a header as arguments for the dataclass.

        ``most`` limits the length of each list. Raises ValueError if a value is missing, of another type or out of range.
        """
        found = {name: _checked(name, kind, header.get(name)) for name, kind in self.numbers.items()}
        return found | {name: _checked_list(name, kind, header.get(name), most[name]) for name, kind in self.lists.items()}

    def record(self, thing: Any) -> dict[str, Any]:
        """Return the recorded fields of an object."""
        found = {} if self._get_exact is None else dict(zip(self._exact, self._get_exact(thing), strict=True))
        for name, omits, shown in self._other:
            value = getattr(thing, name)
            if omits is None or not omits(value, thing):
                found[name] = shown(value)
        return found

    def row(self, allocate: Callable[[str, int, torch.dtype], torch.Tensor], most: Mapping[str, int]) -> Row:
        """Allocate, or open, memory for one object; ``most`` is the largest length of each list."""
        numbers = allocate("numbers", self.dtype.itemsize, torch.uint8).numpy().view(self.dtype)
        types = {"i8": torch.int64, "f8": torch.float64}
        lists = {n: allocate(n, 1 + most[n], types[kind.code]).numpy() for n, kind in self.lists.items() if most[n]}
        return Row(self, numbers, lists)

    def arguments(self, thing: Any) -> dict[str, Any]:
        """Return the numbers and lists of an object by name."""
        return {name: getattr(thing, name) for name in (*self.numbers, *self.lists)}


class Row:
    """The numbers and lists of one object in memory. Only one process writes at a time."""

    def __init__(self, layout: Layout, numbers: np.ndarray[Any, Any], lists: dict[str, np.ndarray[Any, Any]]) -> None:
        self._layout = layout
        self._numbers = numbers
        self._lists = lists
        self._optional = [name for name, kind in layout.numbers.items() if kind.length == "optional"]

    def put(self, found: Mapping[str, Any]) -> None:
        """Write the numbers and lists of an object."""
        self._numbers[0] = tuple(-1 if (value := found[name]) is None else value for name in self._layout.numbers)
        for name, room in self._lists.items():
            value = found[name]
            if value is None:
                room[0] = -1
                continue
            flat = value if self._layout.lists[name].length == "many" else [*value[0], *value[1]]
            room[1 : 1 + len(flat)] = flat
            room[0] = len(flat)

    def get(self) -> dict[str, Any]:
        """Return the numbers and lists as arguments for the dataclass."""
        found = dict(zip(self._layout.numbers, self._numbers[0].item(), strict=True))
        for name in self._optional:
            found[name] = None if found[name] < 0 else found[name]
        for name, room in self._lists.items():
            count = int(room[0])
            if self._layout.lists[name].length == "many":
                found[name] = tuple(room[1 : 1 + count].tolist())
            elif count >= 0:
                flat, half = room[1 : 1 + count].tolist(), count // 2
                found[name] = tuple(flat[:half]), tuple(flat[half:])
        return found


# -- checks -------------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _checked(name: str, kind: Kind, value: Any) -> Any:
    if value is None and kind.length == "optional":
        return None
    if kind.code == "?":
        if isinstance(value, bool):
            return value
        raise ValueError(f"{name} is {_cut(value)}, but it must be true or false.")
    if kind.code == "i8":
        if type(value) is int and kind.least <= value < kind.most:
            return value
        raise ValueError(f"{name} is {_cut(value)}, but it must be a whole number of at least {kind.least}.")
    if (type(value) in (int, float) and abs(value) < 1e308) or isinstance(value, float):
        number = float(value)
        if kind.least == -math.inf or kind.least <= number <= kind.most:
            return number
        raise ValueError(f"{name} is {_cut(value)}, but it must be a finite number of at least {kind.least:g}.")
    raise ValueError(f"{name} is {_cut(value)}, but it must be a number.")


def _checked_list(name: str, kind: Kind, given: Any, most: int) -> Any:
    if kind.length == "points":
        match given:
            case None:
                return None
            case [list(first), list(last)] if len(first) == len(last) and 2 * len(first) == most:
                return tuple(tuple(_checked(name, kind, one) for one in point) for point in (first, last))
        raise ValueError(f"{name} is not two points of {most // 2} numbers.")
    if not isinstance(given, list) or len(given) > most:
        raise ValueError(f"{name} is not a list of at most {most} whole numbers.")
    return tuple(_checked(name, kind, one) for one in given)


def _cut(value: Any) -> str:
    return repr(str(value)[:20])


# -- positions in short form --------------------------------------------------------------------------------------------


def fold(given: Sequence[int]) -> list[int | list[int]]:
    """Return positions in short form: 4, or [first, last, step] for three or more at equal steps."""
    if len(given) < 3:
        return list(given)
    short: list[int | list[int]] = []
    start = 0
    while start < len(given):
        stop = start + 1
        if stop < len(given):
            step = given[stop] - given[start]
            while stop + 1 < len(given) and given[stop + 1] - given[stop] == step:
                stop += 1
            if stop - start >= 2 and step:
                short.append([given[start], given[stop], step])
                start = stop + 1
                continue
        short.append(given[start])
        start += 1
    return short


def expand(short: Iterable[int | list[int]]) -> list[int]:
    """Return the positions of a short form."""
    positions: list[int] = []
    for item in short:
        first, last, step = (item, item, 1) if isinstance(item, int) else item
        positions += range(first, last + (1 if step > 0 else -1), step)
    return positions
