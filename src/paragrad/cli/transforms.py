"""``paragrad transforms``: what can be done to the columns of a table."""

from __future__ import annotations

from typing import Annotated

import typer


def transforms(
    name: Annotated[str | None, typer.Argument(help="One of them, with all its fields.", show_default=False)] = None,
) -> None:
    """What can be done to the columns of a table, or one transformation in full."""
    from paragrad.cli.tables import catalogue, page, told
    from paragrad.data import transforms as known
    from paragrad.errors import unknown

    names = {entry.lower(): entry for entry in known.names()}
    if name is None:
        catalogue(
            "Transformations (--transform)", {entry: told(known.load(names[entry]))[0] for entry in names}, "what it does"
        )
    elif name.lower() not in names:
        raise unknown("transformation", name, names)
    else:
        page(name.lower(), known.load(names[name.lower()]))
