"""``paragrad predict``: the predictions of a trained model, written to a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paragrad.cli.rows import Checkpoint, Data, Label, RunDir, Tree, Weight
from paragrad.errors import UsageError, counted

if TYPE_CHECKING:
    from paragrad.data.given import Given
    from paragrad.load import Trained


def predict(
    run: RunDir,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write: .parquet, .csv or .npy.")],
    data: Data = None,
    label: Label = None,
    weight: Weight = None,
    tree: Tree = None,
    checkpoint: Checkpoint = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Write a trained model's predictions to a file: row number, prediction, probabilities, and the label if there is one.

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
    """Yield the columns of the file, one mini-batch at a time."""
    import numpy as np

    from paragrad.evaluation.outputs import BY_CLASS

    first = 0
    for scores, target in trained.predictions(rows):
        if scores.ndim > 2:
            raise UsageError(
                f"The model predicts an array of shape {scores.shape[1:]} per row, which does not fit a table: use "
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
    """Return the names of the classes, or their numbers if they have no names."""
    import numpy as np

    return np.asarray(classes)[numbers] if classes else numbers


def _each(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield one column without a suffix, or several columns with numbered suffixes."""
    if values.ndim == 1 or values.shape[1] == 1:
        yield "", values.reshape(len(values))
        return
    for number in range(values.shape[1]):
        yield f"_{number}", values[:, number]
