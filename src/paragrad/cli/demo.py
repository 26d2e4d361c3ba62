"""``paragrad demo``: the main job in small, three schemes side by side on data that needs no download."""

from __future__ import annotations

from typing import Annotated

import typer

SCHEMES = ("syncsgd", "agn:window=5", "aeasgd:window=5")
SETTINGS = {
    "data": "digits",
    "model": "mlp",
    "optimizer": "adam:lr=0.003",
    "engine": "local",
    "epochs": 60,
    "batch_size": 32,
    "seed": 0,
}


def demo(workers: Annotated[int, typer.Option(help="How many worker processes.")] = 4) -> None:
    """Train on handwritten digits under three schemes, and compare them."""
    from paragrad.cli.tables import console, table
    from paragrad.cli.train import carry_out
    from paragrad.errors import counted
    from paragrad.rundir.display import number as figure

    results = {}
    for number, scheme in enumerate(SCHEMES, 1):
        console.print(f"\n[bold]{number} of {len(SCHEMES)}: {scheme}[/bold] with {counted(workers, 'worker')}")
        results[scheme] = carry_out(SETTINGS | {"scheme": scheme, "workers": workers}, resume=False, quiet=False, table=False)
    made = table("scheme", "accuracy", "seconds", "samples/s", "commits", "mean staleness")
    for column in made.columns[1:]:
        column.justify = "right"
    for scheme, result in results.items():
        summary = result.summary
        made.add_row(
            scheme,
            figure(summary["test_accuracy"]),
            f"{summary['seconds']:.2f}",
            f"{summary['samples_per_second']:,.0f}",
            f"{summary['commits']:,}",
            f"{summary['staleness']['mean']:.2f}",
        )
    console.print()
    console.print(made)
    console.print("Run directories: " + ", ".join(str(result.directory) for result in results.values()), soft_wrap=True)
    console.print(
        "The same on your own data: paragrad train --data events.parquet --label COLUMN --workers 4 (see docs/data.md)",
        soft_wrap=True,
    )
