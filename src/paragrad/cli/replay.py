"""``paragrad replay``: repeat a run from its record, and say whether the same center comes out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paragrad.errors import counted

if TYPE_CHECKING:
    from paragrad.replay.compare import Replayed


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run, finished or not.")],
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="The largest absolute difference that counts as the same. \\[default: 0, the same bits, for a run on the CPU]",
        ),
    ] = None,
) -> None:
    """Repeat a run in one process, in the order in which its center heard of its workers, and compare the centers.

    The exit status is 1 where they differ more than allowed.

    paragrad replay runs/20250101-120000-agn
    """
    from paragrad.errors import UsageError
    from paragrad.replay.compare import replay as repeat

    if tolerance is not None and not tolerance >= 0:
        raise UsageError(f"--tolerance {tolerance}, but a difference that is allowed is 0 or more.")
    result = repeat(run, tolerance=tolerance)
    show(result)
    if not result.within:
        raise typer.Exit(1)


def show(result: Replayed) -> None:
    """A row for each center that was compared, and what comes of them."""
    from paragrad.cli.tables import console, table

    for note in result.notes:
        console.print(note, soft_wrap=True)
    made = table("center", "update", "largest difference", "of the largest value")
    for column in made.columns[1:]:
        column.justify = "right"
    for pair in result.compared:
        figures = ("none", "none") if pair.equal else (f"{pair.largest:.3g}", f"{pair.relative:.3g}")
        made.add_row(pair.what, f"{pair.clock:,}", *figures)
    console.print(made)
    console.print(
        f"{counted(result.commits, 'commit')} made again in {result.seconds:.1f} s. {verdict(result)}", soft_wrap=True
    )


def verdict(result: Replayed) -> str:
    """One sentence."""
    if not result.compared:
        return "There was nothing to compare them with."
    if result.equal:
        return "The centers are the same to the bit."
    since = f" The first commit with another loss is {result.strayed}." if result.strayed else ""
    if result.within:
        return f"The centers differ by at most {result.largest:.3g}, within the tolerance of {result.tolerance:g}."
    return f"The centers differ by up to {result.largest:.3g}, more than the tolerance of {result.tolerance:g}.{since}"
