"""``paragrad engines``: where workers can run."""

from __future__ import annotations

from typing import Annotated

import typer


def engines(name: Annotated[str | None, typer.Argument(help="One engine: its whole page, with its fields.")] = None) -> None:
    """Where workers can run."""
    from paragrad import engines as known
    from paragrad.cli.tables import listing

    listing("engine", known, name, ("what it is", "when to choose it"), "--engine NAME:field=value chooses it.")
