"""``paragrad data``: data sets that can be trained on, and the columns of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paragrad.errors import counted

if TYPE_CHECKING:
    from paragrad.data.formats.file import Array, Jagged

SHOWN = 4
"""Numbers of a list or an image that are shown."""


def data(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Files, globs or directories whose columns to show.")
    ] = None,
    tree: Annotated[
        str | None, typer.Option(metavar="NAME", help="The tree of a ROOT file, or a group of an HDF5 file.")
    ] = None,
) -> None:
    """List the data that can be trained on; or show the columns of files, with types and first row.

    paragrad data events.root
    """
    if files:
        for file in files:
            _show_columns(file, tree)
        return
    from paragrad.cli.tables import catalogue
    from paragrad.data.load import CATALOGUE

    catalogue("Data (--data)", CATALOGUE, "what it is")


def _show_columns(source: str, tree: str | None) -> None:
    from rich.text import Text

    from paragrad.cli.tables import show, table
    from paragrad.data.formats import open_file
    from paragrad.data.paths import files_of

    for path in files_of(source):
        file = open_file(path, tree)
        rows = sum(file.lengths)
        made = table("column", "type", "first row")
        first = file.read(0, list(file.columns)) if rows else {}
        for name, column in file.columns.items():
            made.add_row(Text(name), Text(str(column)), Text(_first(first[name]) if rows else ""))
        for name, why in file.aside.items():
            made.add_row(Text(name, "dim"), Text(f"no column: {why}", "dim"), "")
        show(made, f"{file.name}: {counted(rows, 'row')}, read in {counted(len(file.lengths), 'piece')}")
        file.close()


def _first(values: Array | Jagged) -> str:
    """Return the first value of a column as short text."""
    from paragrad.data.formats.file import Jagged

    if isinstance(values, Jagged):
        return _shortened(values.values[: values.counts[0]]) or "an empty list"
    return _shortened(values[0].reshape(-1)) if values.ndim > 1 else str(values[0])


def _shortened(values: Array) -> str:
    return ", ".join(f"{value:.4g}" for value in values[:SHOWN]) + ", ..." * (len(values) > SHOWN)
