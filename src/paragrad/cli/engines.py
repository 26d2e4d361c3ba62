"""``paragrad engines``: where workers can run."""

from __future__ import annotations

from typing import Annotated

import typer


def engines(name: Annotated[str | None, typer.Argument(help="One engine: its whole page, with its fields.")] = None) -> None:
    """Where workers can run."""
    from rich.text import Text

    from paragrad import engines as known
    from paragrad.cli.tables import console, page, table, told
    from paragrad.errors import unknown

    if name is not None:
        if name.lower() not in known.names():
            raise unknown("engine", name, known.names())
        page(name.lower(), known.load(name.lower()))
        return
    made = table("engine", "what it is", "when to choose it")
    for entry in known.names():
        what, choose, _ = told(known.load(entry))
        made.add_row(entry, Text(what), Text(choose))
    console.print(made)
    console.print(Text("paragrad engines NAME shows one with its fields; --engine NAME:field=value chooses it.", "dim"))
