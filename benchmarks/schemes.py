"""Every scheme on digits and MNIST, with 2 and 4 workers and several seeds: test accuracy, with its interval.

    .venv/bin/python benchmarks/schemes.py --mnist FILE.npz

Real processes on this machine; the same model, rows and epochs for all. The figures stand in docs/schemes/
(``benchmarks/pages.py`` writes them there).
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
from choices import CHOICES, PLAIN, TASKS

import paragrad as pg
from paragrad import schemes
from paragrad.config import options
from paragrad.data import load
from paragrad.models import builtin


def train(spec: str, optimizer: str, workers: int, seed: int, task: str, data: Any, validation: Any) -> dict[str, Any]:
    """One run; a run that diverges is a figure too."""
    scheme = options.parse(spec, "scheme", schemes)
    settings = TASKS[task]
    figures: dict[str, Any] = {"scheme": spec, "optimizer": optimizer, "workers": workers, "seed": seed, "task": task}
    with tempfile.TemporaryDirectory(prefix="paragrad-bench-") as folder:
        run = pg.Run(out=Path(folder) / "run", validate_every=None, checkpoint_every=None)
        try:
            result = pg.train(
                builtin.build(settings["model"], settings["shape"], 10, seed=seed),
                data,
                validation=validation,
                scheme=scheme,
                engine=pg.Local(workers=workers, threads=1),
                optimizer=optimizer,
                epochs=settings["epochs"],
                batch_size=settings["batch_size"],
                seed=seed,
                run=run,
                verbose=0,
            )
        except pg.Diverged as error:
            return figures | {"diverged": str(error).split(":")[0], "accuracy": None}
    summary = result.summary
    return figures | {
        "accuracy": result.accuracy,
        "train_loss": summary["train_loss"],
        "test_loss": summary["test_loss"],
        "staleness": summary["staleness"]["mean"],
        "commits": summary["commits"],
        "dropped": summary["dropped_commits"],
        "seconds": summary["seconds"],
    }


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=None, repeats=5)
    parser.add_argument("--mnist", help="an .npz with x_train, y_train, x_test, y_test; without it digits alone")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", help="these schemes alone, kept beside the results that are there")
    chosen = parser.parse_args()
    report = measure.Report("schemes", chosen)
    mnist, chosen.mnist = chosen.mnist, chosen.mnist and Path(chosen.mnist).name
    if chosen.only and Path(chosen.out).exists():
        before = json.loads(Path(chosen.out).read_text(encoding="utf-8"))["repeats"]
        report.figures = [f for f in before if f["scheme"].split(":")[0] not in chosen.only]
    tasks = {"digits": "digits"} | ({"mnist": mnist} if mnist else {})
    began = time.monotonic()
    for task, data in tasks.items():
        for seed in range(chosen.repeats):
            parts = load.split(data, None, 0.2 if task == "digits" else None, seed)
            arguments = (seed, task, parts.train, parts.validation)
            jobs = [(spec, optimizer, n) for n in chosen.workers for spec, optimizer in CHOICES]
            jobs += [(spec, optimizer, 1) for spec, optimizer in PLAIN]
            for spec, optimizer, workers in jobs:
                if chosen.only and (workers == 1 or spec.split(":")[0] not in chosen.only):
                    continue
                figures = train(spec, optimizer, workers, *arguments)
                report.figures.append(figures)
                seen = "diverged" if figures["accuracy"] is None else f"{figures['accuracy']:.4f}"
                print(f"{time.monotonic() - began:6.0f} s  {task} seed {seed} {workers} workers {spec}: {seen}", flush=True)
        report.write()


if __name__ == "__main__":
    main()
