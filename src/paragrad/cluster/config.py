"""Clusters as text and as TOML: ``straggler:latency=0.1``, a table of plain values, or a file with a table."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from paragrad.cluster.cluster import Churn, Cluster
from paragrad.cluster.faults import FAULTS
from paragrad.cluster.profiles import PROFILES
from paragrad.cluster.times import TIMES, Time, Trace
from paragrad.config import options
from paragrad.errors import UsageError, unknown

FIELDS = tuple(field.name for field in fields(Cluster))
MAKERS: dict[str, type[Any]] = {**TIMES, **FAULTS, "churn": Churn}
WORDS = {"none": None, "true": True, "false": False, "inf": math.inf}
FORM = "a number of seconds, or a table such as {exponential = 1.0}, {lognormal = [1.0, 0.5]}, {trace = [0.9, 1.1]}"


def from_text(text: str) -> Cluster:
    """Return the cluster of a text: a profile, with or without fields (``straggler:latency=0.1``), or a .toml file."""
    return _from_file(Path(text.strip())) if text.strip().endswith(".toml") else _from_profile(text)


def from_config(value: str | Mapping[str, Any]) -> Cluster:
    """Return the cluster of a TOML value: a text as for ``from_text``, or a table of fields.

    A table may name a ``profile`` whose fields it changes.
    """
    if isinstance(value, str):
        return from_text(value)
    if not isinstance(value, Mapping):
        raise UsageError(f"cluster = {value!r}, but it must be the name of a profile, the path of a .toml file, or a table.")
    given = {}
    for key, item in value.items():
        if key not in (*FIELDS, "profile"):
            raise unknown("field of a cluster:", key, (*FIELDS, "profile"))
        if key != "profile":
            given[key] = _read(key, item)
    return replace(_from_profile(str(value.get("profile", "homogeneous"))), **given)


def to_config(cluster: Cluster) -> str | dict[str, Any]:
    """Return the name of a profile, or a table, from which ``from_config`` makes an equal cluster."""
    return next((name for name, profile in PROFILES.items() if profile == cluster), None) or to_table(cluster)


def to_table(cluster: Cluster) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as plain TOML values."""
    default = Cluster()
    return {name: _plain(getattr(cluster, name)) for name in FIELDS if getattr(cluster, name) != getattr(default, name)}


def _from_profile(text: str) -> Cluster:
    name, pieces = options.split_fields(text)
    if name.lower() not in PROFILES:
        raise unknown("cluster", name, [*PROFILES, "FILE.toml"])
    given = {}
    for key, piece in pieces.items():
        if key not in FIELDS:
            raise unknown("field of a cluster:", key, FIELDS)
        try:
            given[key] = _evaluate(ast.parse(piece, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"{key}={piece} in {text!r}, but a value must be a number, none, a time such as exponential(1.0), a fault such "
                "as crash(worker=2,at=30), or several in brackets."
            ) from None
    return replace(PROFILES[name.lower()], **given)


def _from_file(path: Path) -> Cluster:
    loaded = options.read_toml(path, "Give a .toml file with the fields of a cluster, or the name of a profile.")
    value = loaded.get("cluster", loaded)
    try:
        return _from_profile(value) if isinstance(value, str) else from_config(value)  # a file must not name another file
    except UsageError as error:
        raise UsageError(f"{str(path)!r}: {error}") from None


def _evaluate(node: ast.expr) -> Any:
    """Return the value of an expression of numbers, tuples, times and faults; raise ValueError for any other."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word) if word.lower() in WORDS:
            return WORDS[word.lower()]
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(_evaluate(item) for item in items)
        case ast.Call(func=ast.Name(id=kind), args=args, keywords=named):
            if any(word.arg is None for word in named):
                raise ValueError("**")
            return _make(kind, [_evaluate(arg) for arg in args], {str(word.arg): _evaluate(word.value) for word in named})
    raise ValueError(ast.dump(node))


def _make(kind: str, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return a time, a fault or a churn by its name, with positional and named fields."""
    known = {name.replace("_", ""): name for name in MAKERS}
    if kind.lower().replace("_", "") not in known:
        raise unknown("time or fault", kind, MAKERS)
    kind = known[kind.lower().replace("_", "")]
    if kind == "trace" and args and isinstance(args[0], str):
        return _recorded_trace(args[0], args[1] if len(args) > 1 else named.get("worker"))
    cls = MAKERS[kind]
    names = [field.name for field in fields(cls)]
    for name in named:
        if name not in names:
            raise unknown(f"field of {kind}:", name, names)
    needed = [field.name for field in fields(cls)[len(args) :] if field.default is MISSING and field.name not in named]
    if needed or len(args) > len(names) or set(names[: len(args)]) & set(named):
        given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in named.items())])
        lacking = f", and {' and '.join(needed)} must be given" if needed else ""
        raise UsageError(f"{kind}({given}) is not valid: it takes {', '.join(names)}, each once{lacking}.")
    return cls(*args, **named)


def _recorded_trace(path: str, worker: Any) -> Trace:
    if isinstance(worker, bool) or not isinstance(worker, int):
        raise UsageError(f"The trace of {path!r} needs the rank of a worker, but has {worker!r}: say which worker.")
    return Trace.of(path, worker)


def _read(key: str, item: Any) -> Any:
    if item == "none":
        return None
    if key in ("speeds", "latency"):
        return tuple(_time(key, each) for each in item) if isinstance(item, list | tuple) else _time(key, item)
    if key == "faults":
        if not isinstance(item, list | tuple):
            raise UsageError(f"faults={item!r}, but it must be a list of tables: {{kind = 'crash', worker = 2, at = 30.0}}.")
        return tuple(_fault(each) for each in item)
    if key == "churn":
        if not isinstance(item, Mapping):
            raise UsageError(f"churn={item!r}, but it must be a table such as {{up = {{exponential = 600.0}}, down = 30.0}}.")
        return _make("churn", (), {name: _time(f"churn: {name}", each) for name, each in item.items()})
    return item


def _time(name: str, item: Any) -> Time:
    if isinstance(item, Mapping):
        if isinstance(item.get("trace"), str):
            return _recorded_trace(item["trace"], item.get("worker"))
        if len(item) != 1:
            raise UsageError(f"{name}={dict(item)!r}, but a time is {FORM}.")
        ((kind, given),) = item.items()
        if kind not in TIMES:
            raise unknown("time", kind, TIMES)
        several = isinstance(given, list | tuple) and kind != "trace"
        made: Time = _make(kind, given if several else [given], {})
        return made
    if isinstance(item, bool) or not isinstance(item, int | float):
        raise UsageError(f"{name}={item!r}, but a time is {FORM}.")
    return item


def _fault(item: Any) -> Any:
    if not isinstance(item, Mapping) or "kind" not in item:
        raise UsageError(f"{item!r} in faults has no kind. Write a table such as {{kind = 'crash', worker = 2, at = 30.0}}.")
    if item["kind"] not in FAULTS:
        raise unknown("kind of fault", str(item["kind"]), FAULTS)
    return _make(item["kind"], (), {name: value for name, value in item.items() if name != "kind"})


def _plain(value: Any) -> Any:
    """Return a value of a cluster as numbers, texts, lists and tables."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    kind = next((name for name, cls in MAKERS.items() if type(value) is cls), None)
    if kind is None:
        return value
    given = {field.name: getattr(value, field.name) for field in fields(value) if getattr(value, field.name) != field.default}
    given = {name: _plain(item) for name, item in given.items()}
    if kind in FAULTS:
        return {"kind": kind, **given}
    if kind == "churn":
        return given
    return {kind: next(iter(given.values())) if len(given) == 1 else list(given.values())}
