"""``paragrad schemes``: how workers can cooperate, and when to choose which."""

from __future__ import annotations

from typing import Annotated

import typer


def schemes(name: Annotated[str | None, typer.Argument(help="One scheme: its whole page, with its fields.")] = None) -> None:
    """How workers can cooperate: the equation, when to choose it, when not."""
    from rich.text import Text

    from paragrad import schemes as known
    from paragrad.cli.tables import console, page, table, told
    from paragrad.errors import unknown

    if name is not None:
        by_lower = {entry.lower(): entry for entry in known.names()}
        if name.lower() not in by_lower:
            raise unknown("scheme", name, known.names())
        page(name.lower(), known.load(by_lower[name.lower()]))
        return
    made = table("scheme", "what the center does", "choose it")
    made.show_lines = True
    for entry in known.names():
        equation, choose, _ = told(known.load(entry))
        made.add_row(entry.lower(), Text(equation), Text(choose))
    console.print(made)
    console.print(Text("paragrad schemes NAME shows one whole: when not to take it, where it is from, its fields.", "dim"))
    console.print(Text("--scheme NAME:field=value chooses it.", "dim"))
