"""``paragrad codecs``: how commits can be sent in fewer bytes, and when to choose which."""

from __future__ import annotations

from typing import Annotated

import typer


def codecs(name: Annotated[str | None, typer.Argument(help="One codec: its whole page, with its fields.")] = None) -> None:
    """How commits can be sent in fewer bytes: what is sent, when to choose it, when not."""
    from rich.text import Text

    from paragrad import codecs as known
    from paragrad.cli.tables import console, page, table, told
    from paragrad.errors import unknown

    if name is not None:
        by_lower = {entry.lower(): entry for entry in known.names()}
        if name.lower() not in by_lower:
            raise unknown("codec", name, known.names())
        page(name.lower(), known.load(by_lower[name.lower()]))
        return
    made = table("codec", "what is sent", "choose it")
    made.show_lines = True
    for entry in known.names():
        sent, choose, _ = told(known.load(entry))
        made.add_row(entry.lower(), Text(sent), Text(choose))
    console.print(made)
    console.print(Text("paragrad codecs NAME shows one whole: when not to take it, where it is from, its fields.", "dim"))
    console.print(Text("--codec NAME:field=value chooses it. What is left out goes into a worker's next commit.", "dim"))
