"""Settings that schemes warn of, beside the value that the warning names: test accuracy and loss on digits.

    .venv/bin/python benchmarks/warned.py

An MLP with Adam 0.001 (0.003 for DiLoCo), batches of 16, workers in turn on the vector engine: no speed is measured.
"""

from __future__ import annotations

import statistics
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure

import paragrad as pg
from paragrad import schemes
from paragrad.config import options
from paragrad.models import builtin


@dataclass(frozen=True)
class Case:
    """A setting, and what is advised instead where it is warned of."""

    scheme: str
    advised: str
    workers: int
    epochs: int
    model: str = "mlp"
    optimizer: str = "adam:lr=0.001"


DEEP: dict[str, Any] = {"model": "mlp:128-128-128", "optimizer": "adam:lr=0.003"}
CASES = [
    Case("asyncdiloco", "asyncdiloco:window=45,outer_lr=0.33", 10, 20),
    Case("asyncdiloco", "asyncdiloco:window=11,outer_lr=0.33", 10, 5),
    Case("asyncdiloco", "asyncdiloco:outer_lr=0.22", 4, 20),
    Case("asyncdiloco", "asyncdiloco:window=28,outer_lr=0.33", 4, 5),
    Case("asyncdiloco", "asyncdiloco:outer_lr=0.16", 2, 20),
    Case("gem:window=10", "gem:window=10,momentum=0", 20, 20),
    Case("gem:window=10", "gem:window=10,momentum=0", 10, 5),
    Case("gem:window=10", "gem:window=10,momentum=0", 10, 20),
    Case("gem:window=10", "gem:window=10,momentum=0", 10, 60),
    Case("gem:window=5", "gem:window=5,momentum=0", 20, 20),
    Case("gem:window=10", "gem:window=10,momentum=0", 4, 5),
    Case("diloco:window=90", "diloco:window=90,outer_momentum=0.5", 4, 8, **DEEP),
    Case("diloco:window=36", "diloco:window=36,outer_momentum=0.5", 4, 8, **DEEP),
    Case("diloco:window=50", "diloco:window=50,outer_momentum=0.5", 4, 20, **DEEP),
    Case("diloco:window=18", "diloco:window=18,outer_momentum=0.5", 4, 8, **DEEP),
]
BATCH = 16
ROWS = 1437


def trained(case: Case, scheme: str, seed: int) -> dict[str, float]:
    """Test accuracy and loss of one run."""
    with measure.folder() as folder:
        result = pg.train(
            builtin.build(case.model, (64,), 10, seed),
            "digits",
            holdout=0.2,
            optimizer=case.optimizer,
            scheme=scheme,
            engine=pg.Vector(workers=case.workers),
            epochs=case.epochs,
            batch_size=BATCH,
            seed=seed,
            run=pg.Run(out=folder / "run", validate_every=None, checkpoint_every=None),
            verbose=0,
        )
    return {"accuracy": round(result.accuracy, 4), "loss": round(result.loss, 4)}


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=None, repeats=5)
    given = parser.parse_args()
    report = measure.Report("warned", given)
    warnings.simplefilter("ignore", pg.ParagradWarning)
    rows = []
    for case in CASES:
        plan = pg.SchemePlan(case.workers, -(-ROWS // BATCH) * case.epochs / case.workers, "adam")
        scheme = options.parse(case.scheme, "scheme", schemes)
        found = {
            "scheme": case.scheme,
            "advised": case.advised,
            "workers": case.workers,
            "epochs": case.epochs,
            "model": case.model,
            "optimizer": case.optimizer,
            "windows_per_worker": round(plan.rounds(scheme.window), 2),
            "warned": bool(scheme.warnings(plan)),
            "seen": [trained(case, case.scheme, seed) for seed in range(given.repeats)],
            "seen_advised": [trained(case, case.advised, seed) for seed in range(given.repeats)],
        }
        report.figures.append(found)
        row = [case.scheme, f"{case.workers}", f"{found['windows_per_worker']:.2g}", "yes" if found["warned"] else "no"]
        for key in ("seen", "seen_advised"):
            row += [f"{statistics.median(one[figure] for one in found[key]):.3f}" for figure in ("accuracy", "loss")]
        rows.append([*row, case.advised])
        print(*rows[-1], sep="  ", flush=True)
        report.write()
    heads = ["scheme", "workers", "windows", "warned", "accuracy", "loss", "accuracy advised", "loss advised", "advised"]
    measure.show("Settings that are warned of", heads, rows)


if __name__ == "__main__":
    main()
