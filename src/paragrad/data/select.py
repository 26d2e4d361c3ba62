"""Select rows of a table by an expression over its columns, such as ``pt > 20 and not charge == 0``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, TypeAlias

import numpy as np

from paragrad.data.formats.file import Array, Jagged
from paragrad.errors import UsageError

QUOTED = re.compile(r"`([^`]+)`")
"""A column whose name is not a Python identifier."""
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
Evaluate: TypeAlias = Callable[[Mapping[str, Array | Jagged]], Any]
ALLOWED = "comparisons, and, or, not, + - * / // % **, numbers, text in quotes and names of columns (in `backquotes` if needed)"


@lru_cache(maxsize=32)
def selection(text: str) -> Selection:
    """Return the selection for an expression; cached."""
    return Selection(text)


class Selection:
    """An expression that is true for the rows to use. Only the operations in ``ALLOWED`` are evaluated."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._quoted: list[str] = []
        found: list[str] = []
        try:
            tree = ast.parse(QUOTED.sub(self._keep, text.strip()), mode="eval").body
            self._value = self._compiled(tree, found)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"select {text!r} is not an expression ({error}). Write one such as 'pt > 20 and njet >= 2'."
            ) from None
        if not found:
            raise UsageError(f"select {text!r} names no column: write an expression such as 'pt > 20'.")
        self.names = tuple(dict.fromkeys(found))

    def mask(self, columns: Mapping[str, Array | Jagged], where: str) -> Array:
        """Return True for each selected row. A comparison with NaN is false."""
        try:
            with np.errstate(all="ignore"):
                found = np.asarray(self._value(columns))
        except (TypeError, ArithmeticError) as error:
            raise UsageError(f"select {self.text!r} cannot be computed for {where}: {error}.") from None
        if found.shape != (len(columns[self.names[0]]),) or found.dtype != bool:
            raise UsageError(f"select {self.text!r} is not true or false for each row: compare, as in 'pt > 20'.")
        return found

    def _keep(self, found: re.Match[str]) -> str:
        self._quoted.append(found.group(1))
        return f"{PLACE}{len(self._quoted) - 1}"

    def _name(self, node: ast.expr) -> str | None:
        """Return the name of a column (an identifier, identifiers joined by dots, or a quoted name); None for other nodes."""
        if isinstance(node, ast.Name):
            place = node.id.removeprefix(PLACE)
            return self._quoted[int(place)] if place != node.id and place.isdigit() else node.id
        if isinstance(node, ast.Attribute):
            inner = self._name(node.value)
            return None if inner is None else f"{inner}.{node.attr}"
        return None

    def _compiled(self, node: ast.expr, names: list[str]) -> Evaluate:
        """Return a function that evaluates a node, and add its columns to ``names``. Raise if an operation is not allowed."""
        name = self._name(node)
        if name is not None:
            names.append(name)
            return lambda columns: _column(columns[name], name, self.text)
        if isinstance(node, ast.Compare) and all(type(op) in COMPARISONS for op in node.ops):
            sides = [self._compiled(part, names) for part in (node.left, *node.comparators)]
            tests = [COMPARISONS[type(op)] for op in node.ops]
            return lambda columns: _compared([side(columns) for side in sides], tests)
        if isinstance(node, ast.BoolOp):
            parts, join = [self._compiled(part, names) for part in node.values], LOGIC[type(node.op)]
            return lambda columns: reduce(join, [_truth(part(columns)) for part in parts])
        if isinstance(node, ast.BinOp) and (type(node.op) in LOGIC or type(node.op) in ARITHMETIC):
            left, right = self._compiled(node.left, names), self._compiled(node.right, names)
            if type(node.op) in LOGIC:
                join = LOGIC[type(node.op)]
                return lambda columns: join(_truth(left(columns)), _truth(right(columns)))
            compute = ARITHMETIC[type(node.op)]
            return lambda columns: compute(_number(left(columns)), _number(right(columns)))
        if isinstance(node, ast.UnaryOp):
            inner = self._compiled(node.operand, names)
            if isinstance(node.op, ast.Not | ast.Invert):
                return lambda columns: np.logical_not(_truth(inner(columns)))
            sign = operator.neg if isinstance(node.op, ast.USub) else operator.pos
            return lambda columns: sign(_number(inner(columns)))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
            return lambda columns: node.value
        raise UsageError(f"select {self.text!r} contains {ast.unparse(node)!r}, but it may only contain {ALLOWED}.")


def _compared(sides: Sequence[Any], tests: Sequence[Callable[[Any, Any], Any]]) -> Any:
    found: Any = True
    for left, test, right in zip(sides[:-1], tests, sides[1:], strict=True):
        if _is_text(left) != _is_text(right):
            raise TypeError("text is compared with a number")
        found = np.logical_and(found, test(left, right))
    return found


def _column(values: Array | Jagged, name: str, text: str) -> Array:
    if isinstance(values, Jagged) or values.ndim != 1:
        raise UsageError(
            f"select {text!r} names {name!r}, which has several values per row: select by a column of numbers or text."
        )
    # Small integer types would overflow in a sum.
    return values.astype(np.int64) if values.dtype.kind in "iu" and values.dtype.itemsize < 8 else values


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, np.ndarray) and value.dtype == object)


def _truth(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, np.ndarray | np.bool_) and value.dtype == bool):
        return value
    raise TypeError("and, or, not need values that are true or false, such as comparisons")


def _number(value: Any) -> Any:
    if _is_text(value):
        raise TypeError("arithmetic needs numbers, not text")
    if not isinstance(value, np.ndarray):
        return float(value)  # powers of whole numbers could grow without bound
    return value.astype(np.int64) if value.dtype == bool else value
