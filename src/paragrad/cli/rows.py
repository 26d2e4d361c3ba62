"""The options by which a command is told which run, and which rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|FILE|CLASS=FILE",
        help="Which rows: as for train, as often as you like. \\[default: those that the run was validated on]",
    ),
]
Label = Annotated[str | None, typer.Option(metavar="COLUMN", help="The label. \\[default: as in training]")]
Weight = Annotated[str | None, typer.Option(metavar="COLUMN", help="The weight. \\[default: as in training]")]
Tree = Annotated[str | None, typer.Option(metavar="NAME", help="The tree or group. \\[default: as in training]")]
Checkpoint = Annotated[str | None, typer.Option(metavar="latest", help="The newest checkpoint, of a run that is not finished.")]
