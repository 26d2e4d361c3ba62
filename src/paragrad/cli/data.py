"""``paragrad data``: what can be trained on, and what is in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paragrad.errors import counted

if TYPE_CHECKING:
    from paragrad.data.formats.file import Array, Jagged

SHOWN = 4
"""How many numbers of a row's list or image are shown."""


def data(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]...", help="Files, globs or directories whose columns to show.")
    ] = None,
    tree: Annotated[
        str | None, typer.Option(metavar="NAME", help="The tree of a ROOT file, or a group of an HDF5 file.")
    ] = None,
) -> None:
    """What can be trained on; or the columns of a file, their types and their rows.

    paragrad data events.root
    """
    if files:
        for file in files:
            _show(file, tree)
        return
    from paragrad.cli.tables import catalogue
    from paragrad.data.load import CATALOGUE

    catalogue("Data (--data)", CATALOGUE, "what it is")


def _show(source: str, tree: str | None) -> None:
    from rich.text import Text

    from paragrad.cli.tables import console, table
    from paragrad.data.formats import open_file
    from paragrad.data.paths import files_of

    for path in files_of(source):
        file = open_file(path, tree)
        rows = sum(file.lengths)
        pieces = "1 piece" if len(file.lengths) == 1 else f"{len(file.lengths):,} pieces"
        made = table("column", "type", "first row", title=f"{file.name}: {counted(rows, 'row')}, read in {pieces}")
        first = file.read(0, list(file.columns)) if rows else {}
        for name, column in file.columns.items():
            made.add_row(Text(name), Text(str(column)), Text(_first(first[name]) if rows else ""))
        for name, why in file.aside.items():
            made.add_row(Text(name, "dim"), Text(f"no column: {why}", "dim"), "")
        console.print(made)
        file.close()


def _first(values: Array | Jagged) -> str:
    """The first value of a column, in short."""
    from paragrad.data.formats.file import Jagged

    if isinstance(values, Jagged):
        return _words(values.values[: values.counts[0]]) or "an empty list"
    return _words(values[0].reshape(-1)) if values.ndim > 1 else str(values[0])


def _words(values: Array) -> str:
    return ", ".join(f"{value:.4g}" for value in values[:SHOWN]) + ", ..." * (len(values) > SHOWN)
