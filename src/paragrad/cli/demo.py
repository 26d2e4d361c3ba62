"""``paragrad demo``: three schemes compared on a small data set that needs no download."""

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


def demo(workers: Annotated[int, typer.Option(help="Number of worker processes.")] = 4) -> None:
    """Train on handwritten digits with three schemes, and compare them."""
    from paragrad.cli.tables import console, table
    from paragrad.cli.train import carry_out, costs
    from paragrad.errors import counted
    from paragrad.rundir.display import number as figure

    results = {}
    for number, scheme in enumerate(SCHEMES, 1):
        console.print(f"\n[bold]{number} of {len(SCHEMES)}: {scheme}[/bold] with {counted(workers, 'worker')}")
        results[scheme] = carry_out(SETTINGS | {"scheme": scheme, "workers": workers}, resume=False, quiet=False, table=False)
    made = table("scheme", "accuracy", "seconds", "samples/s", "commits", "mean staleness", right=1)
    for scheme, result in results.items():
        made.add_row(scheme, figure(result.accuracy), *costs(result))
    console.print()
    console.print(made)
    console.print("Run directories: " + ", ".join(str(result.directory) for result in results.values()), soft_wrap=True)
    console.print(
        "With your own data: paragrad train --data events.parquet --label COLUMN --workers 4 (see docs/data.md)",
        soft_wrap=True,
    )
