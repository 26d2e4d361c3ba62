"""``paragrad plot``: a picture of a run, from its record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Where to draw it. \\[default: plot.png in the run's directory]")
    ] = None,
) -> None:
    """Draw a run: the path of a toy problem, or loss and accuracy over time.

    paragrad train --model beale --scheme agn --optimizer sgd:lr=0.02 --out runs/toy && paragrad plot runs/toy
    """
    from paragrad import plot as draw

    typer.echo(f"The picture is {draw.plot(run, out)}")
