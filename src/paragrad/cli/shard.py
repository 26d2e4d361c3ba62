"""``paragrad shard``: one of several processes that share a center, started by hand, for example on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def shard(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The center's run directory, readable from this machine.")],
    index: Annotated[int, typer.Option(metavar="K", help="Number of the shard: 1 is the first after the center's own.")],
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address to listen at. \\[default: any free port; loopback without TLS]"),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="Name by which the center and its workers reach this host.")
    ] = None,
    patience: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for a center that is gone.")] = 600.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Hold a slice of a center that was started with --shards and --shards-elsewhere.

    paragrad shard runs/night --index 3 --listen 0.0.0.0:7003
    """
    from paragrad.engines.sharding.standalone import serve

    serve(
        directory, index, listen=listen, advertise=advertise, patience=patience, say=lambda m: None if quiet else typer.echo(m)
    )
