"""``paragrad replay``: repeat a run from its record, and compare the centers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paragrad.errors import UsageError, counted

if TYPE_CHECKING:
    from paragrad.replay.compare import Replayed


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory; the run may be unfinished.")],
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Largest absolute difference that counts as equal. \\[default: 0 (the same bits) for a run on the CPU]",
        ),
    ] = None,
) -> None:
    """Repeat a run in one process, with the recorded order of commits, and compare the centers.

    The exit status is 1 if they differ by more than the tolerance.

    paragrad replay runs/20250101-120000-agn
    """
    from paragrad.replay.compare import replay as repeat

    if tolerance is not None and not tolerance >= 0:
        raise UsageError(f"--tolerance {tolerance} must be 0 or more.")
    result = repeat(run, tolerance=tolerance)
    show(result)
    if not result.within:
        raise typer.Exit(1)


def show(result: Replayed) -> None:
    """Print a row for each compared center, and the verdict."""
    from paragrad.cli.tables import console, table

    for note in result.notes:
        console.print(note, soft_wrap=True)
    made = table("center", "update", "largest difference", "relative difference", right=1)
    for pair in result.compared:
        figures = ("none", "none") if pair.equal else (f"{pair.largest:.3g}", f"{pair.relative:.3g}")
        made.add_row(pair.what, f"{pair.clock:,}", *figures)
    console.print(made)
    console.print(f"{counted(result.commits, 'commit')} repeated in {result.seconds:.1f} s. {verdict(result)}", soft_wrap=True)


def verdict(result: Replayed) -> str:
    """Return the outcome as one sentence."""
    if not result.compared:
        return "The run has no center to compare with."
    if result.equal:
        return "The centers are the same to the bit."
    if result.within:
        return f"The centers differ by at most {result.largest:.3g}, within the tolerance of {result.tolerance:g}."
    since = f" The first commit with a different loss is {result.strayed}." if result.strayed else ""
    return f"The centers differ by up to {result.largest:.3g}, more than the tolerance of {result.tolerance:g}.{since}"
