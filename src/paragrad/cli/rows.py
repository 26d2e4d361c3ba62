"""Options that select a run and rows, for the commands that use a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|FILE|CLASS=FILE", help="The rows, as for train. Repeatable. \\[default: the run's validation rows]"
    ),
]
Label = Annotated[str | None, typer.Option(metavar="COLUMN", help="The label column. \\[default: as in training]")]
Weight = Annotated[str | None, typer.Option(metavar="COLUMN", help="The weight column. \\[default: as in training]")]
Tree = Annotated[str | None, typer.Option(metavar="NAME", help="The tree or group of the file. \\[default: as in training]")]
Checkpoint = Annotated[
    str | None, typer.Option(metavar="latest", help="Use the newest checkpoint, for a run that is not finished.")
]
