"""``paragrad schemes``: how workers can cooperate, and when to choose which."""

from __future__ import annotations

from typing import Annotated

import typer


def schemes(name: Annotated[str | None, typer.Argument(help="One scheme: its whole page, with its fields.")] = None) -> None:
    """How workers can cooperate: the equation, when to choose it, when not."""
    from paragrad import schemes as known
    from paragrad.cli.tables import listing

    listing("scheme", known, name, ("what the center does", "choose it"), "--scheme NAME:field=value chooses it.")
