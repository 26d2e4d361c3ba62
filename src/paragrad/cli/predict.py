"""``paragrad predict``: what a trained model says of rows, in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paragrad.cli.rows import Checkpoint, Data, Label, RunDir, Tree, Weight
from paragrad.errors import counted

if TYPE_CHECKING:
    from paragrad.data.given import Given
    from paragrad.load import Trained


def predict(
    run: RunDir,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write: .parquet, .csv or .npy.")],
    data: Data = None,
    label: Label = None,
    weight: Weight = None,
    tree: Tree = None,
    checkpoint: Checkpoint = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Write what a trained model says of every row: its number, the prediction, probabilities, and the label if there is one.

    paragrad predict runs/first --data new.npz --out predictions.parquet
    """
    from paragrad.evaluation import predictions
    from paragrad.jobs.recipe import named_data
    from paragrad.load import load

    predictions.check(out, force=force)
    trained = load(run, checkpoint=checkpoint)
    rows = trained.given(named_data(data, label=label, weight=weight, tree=tree), labelled=False)
    written = predictions.write(out, columns(trained, rows), rows.rows)
    if not quiet:
        for note in rows.notes:
            typer.echo(note)
        typer.echo(f"Predictions for {counted(written, 'row')} ({rows.name}): {out}")


def columns(trained: Trained, rows: Given) -> Iterator[dict[str, Any]]:
    """The columns of the file, a mini-batch at a time."""
    import numpy as np

    from paragrad.errors import UsageError
    from paragrad.evaluation.outputs import BY_CLASS

    first = 0
    for part in trained.predictions(rows):
        scores, target = part.scores, part.target
        if scores.ndim > 2:
            raise UsageError(
                f"The model says {scores.shape[1:]} numbers of each row, which is no table: use "
                f"pg.load({str(trained.directory)!r}).predict."
            )
        made: dict[str, Any] = {"row": np.arange(first, first + len(scores))}
        if trained.head in BY_CLASS:
            word = "score" if trained.head == "scores" else "p"
            names = trained.classes or [str(number) for number in range(scores.shape[1])]
            made["prediction"] = named(scores.argmax(1), trained.classes)
            made |= {f"{word}_{name}": scores[:, number] for number, name in enumerate(names)}
        else:
            yes = trained.head in ("sigmoid", "probability")
            for suffix, values in _each(scores):
                made[f"prediction{suffix}"] = named((values > 0.5).astype(np.int64), trained.classes) if yes else values
                if yes:
                    made[f"score{suffix}"] = values
        if target is not None and target.ndim <= 2 and not trained.card.own_target:
            whole = target.dtype.kind in "iu"
            made |= {f"label{suffix}": named(values, trained.classes) if whole else values for suffix, values in _each(target)}
        yield made
        first += len(scores)


def named(numbers: Any, classes: tuple[str, ...] | None) -> Any:
    """Numbers of classes as their names, where they have any."""
    import numpy as np

    return np.asarray(classes)[numbers] if classes else numbers


def _each(values: Any) -> Iterator[tuple[str, Any]]:
    """One column, or several with a number each."""
    if values.ndim == 1 or values.shape[1] == 1:
        yield "", values.reshape(len(values))
        return
    for number in range(values.shape[1]):
        yield f"_{number}", values[:, number]
