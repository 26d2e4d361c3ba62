"""Tables of the command line, and the full description of one scheme, engine, codec or transformation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from paragrad.config.options import fields_of
from paragrad.errors import unknown

console = Console(highlight=False)


def table(*columns: str, right: int | None = None) -> Table:
    """Return an empty table whose first column holds names; columns from index ``right`` on are right-aligned."""
    made = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        justify: JustifyMethod = "left" if right is None or index < right else "right"
        made.add_column(column, style="cyan" if index == 0 else "", no_wrap=index == 0, justify=justify)
    return made


def show(made: Table, title: str) -> None:
    """Print a title and a table. A title of the table's own would be wrapped at the width of the table."""
    console.print(Text(title, "bold"), soft_wrap=True)
    console.print(made)


def catalogue(title: str, entries: Mapping[str, str], what: str) -> None:
    """Print names with one line each."""
    made = table("name", what)
    for name, line in entries.items():
        made.add_row(Text(name), Text(line))
    show(made, title)


def listing(kind: str, known: ModuleType, name: str | None, columns: tuple[str, str], hint: str) -> None:
    """Print the classes of a package, each with what it is and when to choose it; or the page of one."""
    if name is not None:
        page(name, kind, known)
        return
    made = table(kind, *columns)
    made.show_lines = True
    for entry in known.names():
        made.add_row(entry.lower(), *map(Text, summary_of(known.load(entry))))
    console.print(made)
    console.print(Text(f"paragrad {kind}s NAME shows one in full: when not to choose it, its source, its fields.", "dim"))
    console.print(Text(hint, "dim"))


def page(name: str, kind: str, known: ModuleType) -> None:
    """Print the page of the class of that name in a package."""
    by_lower = {entry.lower(): entry for entry in known.names()}
    if name.lower() not in by_lower:
        raise unknown(kind, name, by_lower)
    describe(name.lower(), known.load(by_lower[name.lower()]))
    console.print(Text(f"On the command line: {name.lower()}[:field=value,...]", "dim"))


def describe(name: str, cls: type[Any]) -> None:
    """Print the docstring and the fields of a class."""
    console.print(Text(name, "bold cyan"))
    console.print(Text(flowing(inspect.getdoc(cls) or "")))
    made = table("field", "type", "default", "meaning")
    for field in fields_of(cls):
        made.add_row(Text(field.name), Text(field.type), Text(field.default), Text(flowing(field.doc)))
    console.print(made)


def summary_of(cls: type[Any]) -> tuple[str, str]:
    """Return the first paragraph of a docstring, and when to choose the class."""
    paragraphs = flowing(inspect.getdoc(cls) or "").split("\n")
    first = ";\n".join(re.split(r";\s\s+", paragraphs[0]))
    return first, next((line.removeprefix("Choose it ") for line in paragraphs if line.startswith("Choose it ")), "")


def flowing(text: str) -> str:
    """Return a docstring with its lines joined to paragraphs; "Choose it" and "Not" begin new lines."""
    joined = re.sub(r"(?<!\n)\n(?!\n|\s|Choose it |Not )", " ", text)
    return joined.replace("``", "").replace("*", "")
