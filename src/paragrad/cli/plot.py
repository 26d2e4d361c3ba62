"""``paragrad plot``: a picture of one or several runs, from their records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories; several runs share one picture.")],
    x: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS",
            help="Draw curves over epochs, samples, updates or seconds. \\[default: epochs; for one toy problem, its path]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="The file to write. \\[default: plot.png in the run directory; for several runs, in the current directory]",
        ),
    ] = None,
) -> None:
    """Plot runs: loss and metrics over epochs, or the path on a toy problem.

    paragrad plot runs/first runs/second --x seconds --out compared.png
    """
    from paragrad.plotting import plot as draw

    typer.echo(f"Written: {draw.plot(runs, out, x=x)}")
