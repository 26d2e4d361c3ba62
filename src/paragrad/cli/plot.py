"""``paragrad plot``: a picture of one run or several, from their records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs; several are drawn over each other.")
    ],
    x: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS",
            help="Draw curves over epochs, samples, updates or seconds. \\[default: epochs; of a single toy problem, its path]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Where to draw it. \\[default: plot.png in the run's directory, of several runs in this one]",
        ),
    ] = None,
) -> None:
    """Draw runs: loss and metrics over epochs, or the path of a toy problem.

    paragrad plot runs/first runs/second --x seconds --out compared.png
    """
    from paragrad.plotting import plot as draw

    typer.echo(f"The picture is {draw.plot(runs, out, x=x)}")
