"""``paragrad runs``: the runs in a directory, with status and results."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paragrad.errors import counted

if TYPE_CHECKING:
    from paragrad.rundir.runs import Listed

STYLES = {"finished": "green", "running": "bold cyan", "diverged": "bold red", "failed": "bold red", "damaged": "bold red"}
UNFINISHED = (
    "unfinished: the record has no end, and no process on this machine writes it. The run was killed, or it runs on a machine "
    "whose file locks are not visible here. After a kill: paragrad train --resume RUN"
)
COLUMNS = ("run", "status", "scheme", "engine", "epochs", "accuracy", "loss", "samples/s", "seconds", "started")
NUMBERS = ("epochs", "accuracy", "loss", "samples/s", "seconds")
FIRST_TO_GO = ("engine", "started", "samples/s", "seconds", "epochs", "scheme")
"""Columns that a narrow terminal leaves out, in this order."""


def runs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List runs, oldest first, with their status and results."""
    from paragrad.rundir import runs as listing

    found = listing.found(directory)
    if as_json:
        typer.echo(json.dumps([asdict(listed) for listed in found], indent=2))
        return
    if not found:
        typer.echo(f"No run in {directory}: no directory in it has a record.jsonl.")
        return
    from rich.console import Console
    from rich.text import Text

    from paragrad.cli.tables import console

    hidden: list[str] = []
    made, width = _table(found, directory, hidden)
    while console.is_terminal and width > console.width and len(hidden) < len(FIRST_TO_GO):
        hidden.append(FIRST_TO_GO[len(hidden)])
        made, width = _table(found, directory, hidden)
    Console(highlight=False, width=max(width, console.width)).print(made)  # not cut off in a pipe or a file
    if hidden:
        console.print(Text(f"A wider terminal shows more: {', '.join(hidden)}. So does --json.", "dim"))
    if any(listed.status == "unfinished" for listed in found):
        console.print(Text(UNFINISHED, "dim"))


def _table(found: list[Listed], directory: Path, hidden: list[str]) -> tuple[Any, int]:
    """Return the table without the hidden columns, and its width."""
    from rich.measure import Measurement
    from rich.text import Text

    from paragrad.cli.tables import console, table

    shown = [name for name in COLUMNS if name not in hidden]
    made = table(*shown)
    for name, column in zip(shown, made.columns, strict=True):
        column.justify, column.no_wrap = "right" if name in NUMBERS else "left", True
    for listed in found:
        cells = {name: Text(cell) for name, cell in _cells(listed).items()}
        cells["run"] = Text(Path(listed.run).name if Path(listed.run) != directory else listed.run)
        cells["status"] = Text(_status(listed), STYLES.get(listed.status.split(" (")[0], "yellow"))
        made.add_row(*(cells[name] for name in shown))
    return made, Measurement.get(console, console.options.update(width=10_000), made).maximum


def _status(listed: Listed) -> str:
    from paragrad.rundir.runs import since

    if listed.status not in ("running", "unfinished") or listed.written is None:
        return listed.status
    return f"{listed.status} (written {_span(since(listed.written))} ago)"


def _span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _cells(listed: Listed) -> dict[str, str]:
    workers = "" if listed.workers is None else f", {counted(listed.workers, 'worker')}"
    loss = _figure(listed.loss, ".4f")
    if listed.loss is None and listed.train_loss is not None:
        loss = f"{listed.train_loss:.4f} (training)"
    return {
        "scheme": listed.scheme or "–",
        "engine": (listed.engine or "–").split(":")[0] + workers,
        "epochs": f"{_figure(listed.epochs_done, '.4g')}/{_figure(listed.epochs, 'd')}",
        "accuracy": _figure(listed.accuracy, ".4f"),
        "loss": loss,
        "samples/s": _figure(listed.samples_per_second, ",.0f"),
        "seconds": _figure(listed.seconds, ",.2f") + " virtual" * (listed.virtual and listed.seconds is not None),
        "started": listed.started or "–",
    }


def _figure(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)
