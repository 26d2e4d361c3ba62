"""Which rows of a table are used: an expression over its columns, such as ``pt > 20 and not charge == 0``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from paragrad.data.formats.file import Array, Jagged
from paragrad.errors import UsageError

QUOTED = re.compile(r"`([^`]+)`")
"""A column whose name is no word of Python."""
PLACE = "_column_"
ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
LOGIC: Mapping[type[ast.operator] | type[ast.boolop], Callable[[Any, Any], Any]] = {
    ast.And: np.logical_and,
    ast.Or: np.logical_or,
    ast.BitAnd: np.logical_and,
    ast.BitOr: np.logical_or,
}
COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
ALLOWED = "comparisons, and, or, not, + - * / // % **, numbers, text in quotes and names of columns (odd ones in `backquotes`)"


@lru_cache(maxsize=32)
def selection(text: str) -> Selection:
    """The selection that a text says, parsed once."""
    return Selection(text)


class Selection:
    """An expression that is true for the rows to use; nothing but what ``ALLOWED`` names is ever evaluated."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._quoted: list[str] = []
        try:
            self._tree = ast.parse(QUOTED.sub(self._keep, text.strip()), mode="eval").body
            self.names = tuple(dict.fromkeys(self._columns(self._tree)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"select {text!r} is no expression ({error}). Write one such as 'pt > 20 and njet >= 2'."
            ) from None
        if not self.names:
            raise UsageError(f"select {text!r} names no column: write an expression such as 'pt > 20'.")

    def mask(self, columns: Mapping[str, Array | Jagged], where: str) -> Array:
        """Which of these rows are selected; a comparison with NaN is false."""
        try:
            with np.errstate(all="ignore"):
                found = self._value(self._tree, columns)
        except (TypeError, ArithmeticError) as error:
            raise UsageError(f"select {self.text!r} cannot be computed for {where}: {error}.") from None
        rows = columns[self.names[0]]
        length = len(rows.counts) if isinstance(rows, Jagged) else len(rows)
        found = np.asarray(found)
        if found.shape != (length,) or found.dtype != bool:
            raise UsageError(f"select {self.text!r} is not true or false for each row: compare, as in 'pt > 20'.")
        return found

    # -- parsing --------------------------------------------------------------------------------------------

    def _keep(self, found: re.Match[str]) -> str:
        self._quoted.append(found.group(1))
        return f"{PLACE}{len(self._quoted) - 1}"

    def _columns(self, node: ast.expr) -> Iterator[str]:
        """The columns that an expression names; raises for what is not allowed."""
        name = self._name(node)
        if name is not None:
            yield name
        elif isinstance(node, ast.Compare):
            for part in (node.left, *node.comparators):
                yield from self._columns(part)
            if all(type(op) in COMPARISONS for op in node.ops):
                return
            raise self._refusal(node)
        elif isinstance(node, ast.BoolOp):
            for part in node.values:
                yield from self._columns(part)
        elif isinstance(node, ast.BinOp) and (type(node.op) in ARITHMETIC or type(node.op) in LOGIC):
            yield from self._columns(node.left)
            yield from self._columns(node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert | ast.USub | ast.UAdd):
            yield from self._columns(node.operand)
        elif not (isinstance(node, ast.Constant) and isinstance(node.value, int | float | str)):
            raise self._refusal(node)

    def _refusal(self, node: ast.expr) -> UsageError:
        return UsageError(f"select {self.text!r} holds {ast.unparse(node)!r}, but it may only hold {ALLOWED}.")

    def _name(self, node: ast.expr) -> str | None:
        """A column: a word, words with dots between them, or whatever was quoted."""
        if isinstance(node, ast.Name):
            place = node.id.removeprefix(PLACE)
            return self._quoted[int(place)] if place != node.id and place.isdigit() else node.id
        if isinstance(node, ast.Attribute):
            inner = self._name(node.value)
            return None if inner is None else f"{inner}.{node.attr}"
        return None

    # -- evaluating -----------------------------------------------------------------------------------------

    def _value(self, node: ast.expr, columns: Mapping[str, Array | Jagged]) -> Any:
        name = self._name(node)
        if name is not None:
            return _column(columns[name], name, self.text)
        if isinstance(node, ast.Compare):
            sides = [self._value(part, columns) for part in (node.left, *node.comparators)]
            found: Any = True
            for left, op, right in zip(sides[:-1], node.ops, sides[1:], strict=True):
                _check_comparable(left, right)
                found = np.logical_and(found, COMPARISONS[type(op)](left, right))
            return found
        if isinstance(node, ast.BoolOp):
            values = [_truth(self._value(part, columns)) for part in node.values]
            found = values[0]
            for value in values[1:]:
                found = LOGIC[type(node.op)](found, value)
            return found
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left, columns), self._value(node.right, columns)
            if type(node.op) in LOGIC:
                return LOGIC[type(node.op)](_truth(left), _truth(right))
            return ARITHMETIC[type(node.op)](_number(left), _number(right))
        if isinstance(node, ast.UnaryOp):
            value = self._value(node.operand, columns)
            if isinstance(node.op, ast.Not | ast.Invert):
                return np.logical_not(_truth(value))
            return -_number(value) if isinstance(node.op, ast.USub) else _number(value)
        assert isinstance(node, ast.Constant)
        return node.value


def _column(values: Array | Jagged, name: str, text: str) -> Array:
    if isinstance(values, Jagged) or values.ndim != 1:
        raise UsageError(f"select {text!r} names {name!r}, which has several values in each row: select by one number or text.")
    # Bytes and the like would overflow in a sum.
    return values.astype(np.int64) if values.dtype.kind in "iu" and values.dtype.itemsize < 8 else values


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, np.ndarray) and value.dtype == object)


def _check_comparable(left: Any, right: Any) -> None:
    if _is_text(left) != _is_text(right):
        raise TypeError("text is compared with a number")


def _truth(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, np.ndarray | np.bool_) and value.dtype == bool):
        return value
    raise TypeError("and, or, not join what is true or false, such as comparisons")


def _number(value: Any) -> Any:
    if _is_text(value):
        raise TypeError("arithmetic needs numbers, not text")
    if not isinstance(value, np.ndarray):
        return float(value)  # powers of whole numbers could grow without end
    return value.astype(np.int64) if value.dtype == bool else value
