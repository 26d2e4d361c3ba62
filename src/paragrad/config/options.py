"""Options as text: ``name:field=value,...`` to a dataclass and back, and the ``run.toml`` that repeats a run."""

from __future__ import annotations

import ast
import inspect
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from paragrad.errors import UsageError, unknown

PLAIN = re.compile(r"[\w.:/+@%-]+")
"""Text that needs no quotes; other text is quoted as in Python."""
JOINED = re.compile(r"[\w.:/@%*?-]+")
"""A name that can be joined to others by ``+``; other names are written as a Python tuple."""
WORD = re.compile(r"[A-Za-z_][\w-]*")
APART = "apart"
"""Mark in the metadata of a field that is not part of the text, because it has a separate option."""
CONSTANTS = {"true": True, "false": False, "none": None}

CONFIG: Mapping[str, type | UnionType] = {
    "data": str | list,
    "validation": str | list,
    "features": list,
    "exclude": list,
    "label": str,
    "weight": str,
    "select": str,
    "tree": str,
    "pad": int | dict,
    "stream": bool,
    "transform": list,
    "model": str,
    "loss": str,
    "metric": list,
    "optimizer": str,
    "schedule": str,
    "clip_norm": float,
    "clip_value": float,
    "scheme": str,
    "engine": str,
    "codec": str,
    "cluster": str | dict,
    "workers": int,
    "threads": int,
    "device": str,
    "on_failure": str,
    "epochs": int,
    "batch_size": int,
    "seed": int,
    "holdout": float,
    "partition": str,
    "distances": bool,
    "validate_every": int | float | str,
    "keep": str,
    "checkpoint_every": float,
    "max_seconds": float,
    "target_accuracy": float,
    "target_loss": float,
    "patience": int,
    "out": str,
}
"""Keys of a run.toml with their types: the options of ``paragrad train``. A table ``[about]`` is ignored."""


class Table(Protocol):
    """Classes by name, as in the packages ``schemes`` and ``engines``."""

    def names(self) -> tuple[str, ...]: ...

    def load(self, name: str) -> type[Any]: ...


@dataclass(frozen=True)
class FieldHelp:
    """Help text for one field of a dataclass."""

    name: str
    type: str
    default: str
    doc: str


def parse(text: str, kind: str, table: Table) -> Any:
    """Return the object that a text such as ``agn:window=15`` describes, each value converted to the type of its field."""
    name, pieces = split_fields(text)
    known = {entry.lower(): entry for entry in table.names()}
    if name.lower() not in known:
        raise unknown(kind, name, list(known))
    cls = table.load(known[name.lower()])
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls) if field.init]
    apart = [field.name for field in fields(cls) if APART in field.metadata]
    given = {}
    for key, value in pieces.items():
        if key not in names:
            raise unknown(f"field of {kind} {name!r}:", key, names)
        if key in apart:
            raise UsageError(f"{key}={value} in {text!r}, but {key} has a separate option: --{key} {value}.")
        try:
            given[key] = _typed(value, hints[key])
        except ValueError:
            raise UsageError(f"{key}={value} in {text!r}, but {key} must be {expected(hints[key])}.") from None
    return cls(**given)


def made(given: Any, kind: str, table: Table, protocol: Any, example: str) -> Any:
    """Return an object, given itself or its text; raise for any other value."""
    if isinstance(given, str):
        return parse(given, kind, table)
    if isinstance(given, type):
        raise UsageError(f"{kind}={given.__name__} is a class: give an instance, {given.__name__}().")
    if not isinstance(given, protocol):
        names = ", ".join(name.lower() for name in table.names())
        raise UsageError(f"{kind}={given!r} is not valid. Give an object such as {example}, or a name: {names}.")
    return given


def parse_fields(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the fields of a text such as ``adam:lr=0.001,betas=(0.9,0.99)``.

    A value is a Python literal or a bare word.
    """
    name, pieces = split_fields(text)
    given = {}
    for key, value in pieces.items():
        try:
            given[key] = _literal(value)
        except ValueError:
            raise UsageError(
                f"{key}={value} in {text!r}, but a value must be a number, true, false, none, a word or a tuple: (0.9,0.99)."
            ) from None
    return name, given


def split_fields(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the text of each field of ``name:a=1,b=(2,3)``; commas in brackets and quotes do not split."""
    name, colon, rest = text.strip().partition(":")
    pieces: dict[str, str] = {}
    for piece in _cut(rest) if colon else ():
        key, equals, value = piece.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise UsageError(f"{piece!r} in {text!r} is not field=value. Write {name}:field=value,field=value.")
        if key in pieces:
            raise UsageError(f"{key!r} is given twice in {text!r}.")
        pieces[key] = value.strip()
    return name.strip(), pieces


def describe(thing: Any) -> str:
    """Return the shortest text that ``parse`` turns into an equal object; fields with default values are left out."""
    name = getattr(thing, "name", type(thing).__name__.lower())
    mine = [field for field in fields(thing) if field.init and APART not in field.metadata]
    changed = [(f.name, getattr(thing, f.name)) for f in mine if getattr(thing, f.name) != _default(f)]
    return name + ":" * bool(changed) + ",".join(f"{key}={_text(value)}" for key, value in changed)


def fields_of(cls: type[Any]) -> list[FieldHelp]:
    """Return the fields of a dataclass with type, default and the docstring below each."""
    hints = get_type_hints(cls)
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        docs |= _field_docs(base)
    return [
        FieldHelp(f.name, expected(hints[f.name]), "" if _default(f) is MISSING else _text(_default(f)), docs.get(f.name, ""))
        for f in fields(cls)
        if f.init
    ]


def expected(hint: Any) -> str:
    """Return a type in words."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(expected(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        dict: "a table",
        list: "a list",
        NoneType: "none",
    }
    if get_origin(hint) is tuple:
        return "names joined by +" if hint == tuple[str, ...] else "numbers in brackets"
    return words.get(hint) or (hint.__name__ if isinstance(hint, type) else str(hint))


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a run.toml."""
    path.write_text(as_toml(config), encoding="utf-8")


def as_toml(config: Mapping[str, Any]) -> str:
    """Return a TOML text: plain values first, then tables; nested tables are inline, None is "none"."""
    plain = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_toml(value)}" for key, value in plain.items()]
    for name, table in config.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_key(name)}]", *(f"{_key(key)} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def read_config(path: Path) -> dict[str, Any]:
    """Read the options in a run.toml, checked by name and type; "none" becomes None."""
    loaded = read_toml(path, "Give the run.toml of a run, or your own.")
    loaded.pop("about", None)
    config: dict[str, Any] = {}
    for key, value in loaded.items():
        if key not in CONFIG:
            raise unknown(f"option in {str(path)!r}:", key, CONFIG)
        config[key] = _checked(value, CONFIG[key], f"{key} = {value!r} in {str(path)!r}")
    return config


def read_toml(path: Path, remedy: str) -> dict[str, Any]:
    """Read a TOML file; ``remedy`` is part of the error if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"There is no file {str(path)!r}. {remedy}") from None
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read ({error.strerror}). {remedy}") from None
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is not TOML: {error}.") from None


def _checked(value: Any, kind: type | UnionType, where: str) -> Any:
    if value == "none":
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{where}, but it must be {expected(kind)}.")
    return value


def _cut(text: str) -> list[str]:
    pieces, depth, quote, start, escaped = [], 0, "", 0, False
    for position, char in enumerate(text):
        if quote:
            if char == quote and not escaped:
                quote = ""
            escaped = char == "\\" and not escaped
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            pieces.append(text[start:position])
            start = position + 1
    return [*pieces, text[start:]]


def _typed(text: str, hint: Any) -> Any:
    """Return the value of a text under a type; raise ValueError if it has none."""
    if get_origin(hint) in (Union, UnionType):
        options: Sequence[Any] = get_args(hint)
        if NoneType in options and text.lower() == "none":
            return None
        for option in options:
            with suppress(ValueError):
                return _typed(text, option)
        raise ValueError(text)
    if get_origin(hint) is Literal:
        for choice in get_args(hint):
            if str(choice).lower() == text.lower():
                return choice
        raise ValueError(text)
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    if hint is int or hint is float:
        return hint(text)
    if hint is str:
        return _literal(text) if text[:1] in ("'", '"') else text
    if hint is NoneType:
        raise ValueError(text)
    if hint == tuple[str, ...] and text[:1] not in ("(", "'", '"'):
        return tuple(text.split("+"))
    return _literal(text)


def _literal(text: str) -> Any:
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    if WORD.fullmatch(text):
        return text
    try:
        return ast.literal_eval(text)
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError(text) from error


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) and value.lower() not in CONSTANTS else repr(value)
    if isinstance(value, tuple) and value and all(isinstance(name, str) and JOINED.fullmatch(name) for name in value):
        return "+".join(value)
    return repr(value)


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _field_docs(cls: type[Any]) -> dict[str, str]:
    try:
        body = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    docs: dict[str, str] = {}
    for statements in pairwise(body.body if isinstance(body, ast.ClassDef) else []):
        match statements:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                docs[name] = " ".join(text.split())
    return docs


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
