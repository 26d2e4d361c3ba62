"""``paragrad evaluate``: the metrics of a trained model on labelled rows."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paragrad.cli.rows import Checkpoint, Data, Label, RunDir, Tree, Weight

if TYPE_CHECKING:
    from paragrad.data.given import Given
    from paragrad.load import Trained

NAMES = {
    "rows": "rows",
    "accuracy": "accuracy",
    "loss": "loss",
    "log_loss": "log loss",
    "auc": "ROC AUC",
    "f1": "F1",
    "f1_macro": "F1 (mean over classes)",
    "mse": "mean squared error",
    "mae": "mean absolute error",
    "r2": "R²",
}
"""Titles of the metrics, in the order of display."""
WIDEST = 20
"""Largest number of classes whose confusion matrix is shown."""


def evaluate(
    run: RunDir,
    data: Data = None,
    label: Label = None,
    weight: Weight = None,
    tree: Tree = None,
    checkpoint: Checkpoint = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="A further metric: a function of (output, target). Repeatable."),
    ] = None,
    positive: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS", help="The class for F1. \\[default: as in training; else signal; else the second of two]"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Evaluate a trained model: accuracy, loss, AUC, F1, confusion matrix; with weights, significance.

    paragrad evaluate runs/first --data test.npz
    """
    from paragrad.jobs.recipe import named_data
    from paragrad.load import load

    trained = load(run, checkpoint=checkpoint)
    rows = trained.given(named_data(data, label=label, weight=weight, tree=tree), labelled=True)
    found = trained.judged(rows, metrics=metric, positive=positive)
    if as_json:
        typer.echo(json.dumps(_plain(found) | {"classes": trained.classes, "data": rows.name}))
    else:
        show(trained, rows, found)


def show(trained: Trained, rows: Given, found: dict[str, Any]) -> None:
    """Print the metrics, the confusion matrix and the best cut as tables."""
    from rich.text import Text

    from paragrad.cli.tables import console, table
    from paragrad.cli.tables import show as show_table

    for note in rows.notes:
        console.print(note, soft_wrap=True, markup=False)
    console.print(f"{trained.directory}, on {rows.name}:", soft_wrap=True, markup=False)
    made = table("metric", "value", right=1)
    titles = NAMES | {"f1": f"F1 of {found['positive']}"} if "positive" in found else NAMES
    further = [name for name, value in found.items() if name not in NAMES and isinstance(value, float)]
    for name, title in {**titles, **{name: name for name in further}}.items():
        if name in found:
            made.add_row(Text(title), f"{found[name]:,}" if name == "rows" else figure(found[name]))
    console.print(made)
    matrix = found.get("confusion")
    if matrix is not None and len(matrix) <= WIDEST:
        names = trained.classes or tuple(str(number) for number in range(len(matrix)))
        made = table("true \\ predicted", *names, right=1)
        for name, line in zip(names, matrix, strict=True):
            made.add_row(Text(name), *(f"{value:,}" if isinstance(value, int) else figure(value) for value in line))
        show_table(made, "Confusion matrix")
    best = found.get("significance")
    if best is not None:
        made = table("best cut on the score", "signal s", "background b", "AMS", "s / √b", right=0)
        made.add_row(*(figure(best[name]) for name in ("cut", "s", "b", "ams", "s_over_root_b")))
        show_table(made, "Significance (weights as events)")


def figure(value: float) -> str:
    """Return a number as text with four decimals; a dash for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics with None for NaN, which JSON does not have."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in found.items()}
