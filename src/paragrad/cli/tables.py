"""How the listing commands look: one kind of table, and the full page of one entry."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paragrad.config.options import FieldHelp, fields_of
from paragrad.errors import unknown

console = Console(highlight=False)


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table whose first column is the name."""
    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False)
    for position, column in enumerate(columns):
        made.add_column(column, style="cyan" if position == 0 else "", no_wrap=position == 0)
    return made


def catalogue(title: str, entries: Mapping[str, str], what: str) -> None:
    """Names with one line each."""
    made = table("name", what, title=title)
    for name, line in entries.items():
        made.add_row(Text(name), Text(line))
    console.print(made)


class Known(Protocol):
    """A package of things that have names."""

    def names(self) -> Sequence[str]:
        """The names of the classes."""

    def load(self, name: str) -> type[Any]:
        """The class of that name."""


def listing(kind: str, known: Known, name: str | None, columns: tuple[str, str], *hints: str) -> None:
    """All of a kind, with what each is and when to choose it; or one of them, whole."""
    if name is not None:
        by_lower = {entry.lower(): entry for entry in known.names()}
        if name.lower() not in by_lower:
            raise unknown(kind, name, by_lower)
        page(name.lower(), known.load(by_lower[name.lower()]))
        return
    made = table(kind, *columns)
    made.show_lines = True
    for entry in known.names():
        first, choose, _ = told(known.load(entry))
        made.add_row(entry.lower(), Text(first), Text(choose))
    console.print(made)
    one = f"paragrad {kind}s NAME shows one whole: when not to take it, where it is from, its fields."
    for line in (one, *hints):
        console.print(Text(line, "dim"))


def page(name: str, cls: type[Any]) -> None:
    """All that the docstring of a class says, and its fields."""
    console.print(Text(name, "bold cyan"))
    console.print(Text(flowing(inspect.getdoc(cls) or "")))
    console.print(field_table(fields_of(cls)))
    console.print(Text(f"On the command line: {name}[:field=value,...]", "dim"))


def field_table(fields: Iterable[FieldHelp]) -> Table:
    """Fields with type, default and what they mean."""
    made = table("field", "type", "default", "meaning")
    for field in fields:
        made.add_row(Text(field.name), Text(field.type), Text(field.default), Text(flowing(field.doc)))
    return made


def told(cls: type[Any]) -> tuple[str, str, str]:
    """Of a docstring: the first paragraph, when to choose the thing, and when not."""
    paragraphs = flowing(inspect.getdoc(cls) or "").split("\n")
    first = ";\n".join(re.split(r";\s\s+", paragraphs[0]))
    choose = next((line.removeprefix("Choose it ") for line in paragraphs if line.startswith("Choose it ")), "")
    avoid = next((line.removeprefix("Not ") for line in paragraphs if line.startswith("Not ")), "")
    return first, choose, avoid


def flowing(text: str) -> str:
    """A docstring with its lines joined to paragraphs, "Choose" and "Not" on lines of their own."""
    joined = re.sub(r"(?<!\n)\n(?!\n|\s|Choose it |Not )", " ", text)
    return joined.replace("``", "").replace("*", "")
