"""``paragrad codecs``: how commits can be sent in fewer bytes, and when to choose which."""

from __future__ import annotations

from typing import Annotated

import typer


def codecs(name: Annotated[str | None, typer.Argument(help="One codec: its whole page, with its fields.")] = None) -> None:
    """How commits can be sent in fewer bytes: what is sent, when to choose it, when not."""
    from paragrad import codecs as known
    from paragrad.cli.tables import listing

    listing(
        "codec",
        known,
        name,
        ("what is sent", "choose it"),
        "--codec NAME:field=value chooses it. What is left out goes into a worker's next commit.",
    )
