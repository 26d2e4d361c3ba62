"""What codecs cost in accuracy, and how many bytes they save: AGN with two workers on MNIST.

    .venv/bin/python benchmarks/codecs.py --mnist FILE.npz [--epochs E] [--repeats SEEDS]

An MLP 784-256-10, Adam, mini-batches of 64, a commit every 4 steps, workers in turn under a virtual clock, so that the figures
are those of the codec and not of the machine. A repeat is a seed, of weights and of the order of rows; accuracies are compared
within one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import measure

import paragrad as pg
from paragrad.config.options import describe
from paragrad.models import builtin

CODECS: dict[str, pg.Codec | None] = {
    "none": None,
    "fp16": pg.FP16(),
    "bf16": pg.BF16(),
    "int8": pg.Int8(),
    "onebit": pg.OneBit(),
    "threshold": pg.Threshold(),
    "threshold, ±τ": pg.Threshold(values=False),
    "topk 1 %": pg.TopK(0.01),
}
ASKED = {"int8": "about 4", "topk 1 %": ">= 40"}
"""How many times fewer bytes were asked for."""
POINTS = 0.3
"""Points of accuracy that these may cost."""


def trained(codec: pg.Codec | None, data: str, seed: int, epochs: int, out: Path) -> dict[str, Any]:
    """One run: its test accuracy, and what its commits weighed."""
    result = pg.train(
        builtin.build("mlp:256", (28, 28), 10, seed),
        data,
        scheme=pg.AGN(window=4),
        engine=pg.Vector(workers=2, mode="loop", threads=1),
        codec=codec,
        epochs=epochs,
        batch_size=64,
        seed=seed,
        run=pg.Run(out=out, validate_every=None, checkpoint_every=None),
        verbose=0,
    )
    summary = result.summary
    return {
        "accuracy": round(summary["test_accuracy"], 4),
        "test_loss": round(summary["test_loss"], 4),
        "commits": summary["commits"],
        "bytes_sent": summary["bytes_sent"],
        "plain_over_sent": summary.get("plain_over_sent", 1.0),
    }


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=None, repeats=3)
    parser.add_argument("--mnist", required=True, help="an .npz with x_train, y_train, x_test, y_test")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    report = measure.Report("codecs", options)
    data = options.mnist
    options.mnist = Path(data).name
    for seed in range(options.repeats):
        found: dict[str, Any] = {"seed": seed}
        for name, codec in CODECS.items():
            with measure.folder() as folder:
                figures = trained(codec, data, seed, options.epochs, folder / "run")
            found[f"{name}: accuracy"] = 100 * figures["accuracy"]
            found[f"{name}: times fewer bytes"] = figures["plain_over_sent"]
            found[name] = figures | {"codec": None if codec is None else describe(codec)}
            print(f"seed {seed}  {name}: {figures}", flush=True)
        for name in CODECS:
            found[f"{name}: points"] = found[f"{name}: accuracy"] - found["none: accuracy"]
        report.figures.append(found)
    rows = []
    for name in CODECS:
        accuracies, points = report.column(f"{name}: accuracy"), report.column(f"{name}: points")
        times = report.column(f"{name}: times fewer bytes")
        rows.append([name, measure.spread(accuracies), measure.spread(points), measure.spread(times, 1)])
        if name in ASKED:
            report.claims += [
                measure.Claim.over(f"{name}: times fewer bytes sent", times, target=ASKED[name]),
                measure.Claim.over(f"{name}: points of MNIST accuracy", points, target=f">= -{POINTS}"),
            ]
    measure.show("AGN, 2 workers, MNIST", ["codec", "accuracy, %", "points", "times fewer bytes"], rows)
    report.write()


if __name__ == "__main__":
    main()
