"""The vector engine on a GPU: many replicas at once, the thesis's cells end to end, beside what a user would do instead.

    .venv/bin/python benchmarks/vector.py --mnist FILE.npz [--device cuda] [--part replicas,cell,cells]

*replicas*: 512 replicas of an MLP 784-600-600-10, batch 64, SGD, microseconds a worker-step, timed with device events after a
warm-up; beside one replica after another in plain PyTorch on the same device, 16 processes that each train one replica and do
not even talk, and DistributedDataParallel with 4 processes (gloo: NCCL wants a device for each).
*cell*: the thesis's n = 20, λ = 15 (MLP 784-1000-2000-1000-10, Adam, mini-batches of 128, 40 epochs in total over all workers,
MNIST) with the real center and scheme, seconds from the start barrier to the last commit; 5 seeds.
*cells*: all 49 of n, λ = 10, 15, ..., 40.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import peers
import torch
from torch import nn

import paragrad as pg
from paragrad import models
from paragrad.data import load
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.learners.rows import Task, TorchRows
from paragrad.learners.torch import TorchLearner

REPLICAS, BATCH, WINDOW = 512, 64, 20
SIZES = "mlp:600-600"
THESIS = "mlp:1000-2000-1000"
GRID = range(10, 41, 5)
PUBLISHED = {
    (10, 10): 0.9843, (10, 20): 0.9861, (10, 40): 0.9843, (20, 10): 0.9836, (20, 15): 0.9845, (20, 40): 0.9834,
    (30, 10): 0.9725, (30, 20): 0.9848, (30, 40): 0.9830, (40, 10): 0.9555, (40, 20): 0.9840, (40, 40): 0.9818,
}  # fmt: skip
"""Validation accuracy of AGN in Hermans' thesis, one run each."""


def microseconds(go: Callable[[], int], device: str, repeats: int = 3) -> float:
    """Of one worker-step: ``go`` makes a number of them, which it returns."""
    go()
    if device == "cpu":
        began = time.perf_counter()
        steps = sum(go() for _ in range(repeats))
        return (time.perf_counter() - began) * 1e6 / steps
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()  # type: ignore[no-untyped-call]
    steps = sum(go() for _ in range(repeats))
    end.record()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / steps


def together(data: Arrays, device: str, precision: Any, replicas: int) -> float:
    """All replicas at once."""
    plan = Plan(len(data), BATCH, 100)
    learner = TorchLearner(models.build(SIZES, (784,), 10), nn.CrossEntropyLoss(), "sgd:lr=0.01")
    rows = TorchRows(learner, replicas, data, plan, device=device, precision=precision)
    rows.warm_up()
    place = 0

    def go() -> int:
        nonlocal place
        tasks = []
        for row in range(replicas):
            tasks.append(Task(row, tuple((place + k) % (plan.batches - 1) for k in range(WINDOW))))
            place += WINDOW
        rows.run(tasks)
        return replicas * WINDOW

    return microseconds(go, device)


def replicas(report: measure.Report, device: str, seconds: float) -> None:
    """Microseconds a worker-step, all ways in one run."""
    generator = torch.Generator().manual_seed(0)
    data = Arrays((torch.randn(60_000, 784, generator=generator), torch.randint(0, 10, (60_000,), generator=generator)))
    for _ in range(report.options.repeats):
        figures: dict[str, Any] = {"part": "replicas"}
        for precision in ("float32", "tf32", "bf16"):
            figures[f"together_{precision}_us"] = together(data, device, precision, REPLICAS)
        step = peers.replica(0, 1, SIZES, BATCH, device)

        def many(step: Callable[[], None] = step) -> int:
            for _ in range(200):
                step()
            return 200

        figures["one_by_one_us"] = microseconds(many, device)
        found = measure.together(peers.replica_waited_for, 16, SIZES, BATCH, device, seconds=seconds)
        figures["processes_16_us"] = 1e6 / measure.rate(found, seconds)
        with tempfile.TemporaryDirectory() as folder:
            found = measure.together(
                peers.member_on_device, 4, SIZES, BATCH, device, str(Path(folder) / "meet"), seconds=seconds
            )
        figures["ddp_4_us"] = 1e6 / measure.rate(found, seconds)
        report.figures.append(figures)
        print(figures, flush=True)
    mine = [figures for figures in report.figures if figures["part"] == "replicas"]
    column = lambda key: [figures[key] for figures in mine]  # noqa: E731
    ratio = [figures["one_by_one_us"] / figures["together_float32_us"] for figures in mine]
    over = measure.Claim.over
    report.claims += [
        over("512 replicas at once, fp32, us a worker-step", column("together_float32_us"), target="<= 12 (aim 6)"),
        over("the same, TF32", column("together_tf32_us")),
        over("times as fast as one after another on the same GPU", ratio, unit="x", target=">= 100"),
        over("one after another, us a worker-step", column("one_by_one_us")),
        over("16 processes that do not talk, us a worker-step", column("processes_16_us")),
        over("DDP with 4 processes (gloo), us a worker-step", column("ddp_4_us")),
    ]


def cell(parts: load.Split, device: str, workers: int, window: int, precision: Any, seed: int) -> dict[str, Any]:
    """One cell of the thesis, end to end."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = pg.train(
            models.build(THESIS, (28, 28), 10, seed),
            parts.train,
            validation=parts.validation,
            optimizer="adam:lr=0.001",
            scheme=pg.AGN(window=window),
            engine=pg.Vector(workers=workers, device=device, precision=precision),
            epochs=40,
            batch_size=128,
            seed=seed,
            run=pg.Run(out=Path(folder) / "run", validate_every=None, checkpoint_every=None),
        )
    found = {
        "workers": workers,
        "window": window,
        "precision": precision,
        "seed": seed,
        "accuracy": result.accuracy,
        "wall_seconds": result.summary["wall_seconds"],
        "with_set_up": time.perf_counter() - began,
        "virtual_seconds": result.seconds,
        "commits": result.summary["commits"],
        "staleness": result.staleness.mean,
    }
    print(found, flush=True)
    return found


def main() -> None:
    parser = measure.parser("vector", __doc__, seconds=6, repeats=3)
    parser.add_argument("--mnist", help="an .npz with MNIST; without it, only the replicas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--part", default="replicas,cell,cells")
    options = parser.parse_args()
    report = measure.Report("vector", options)
    if options.device != "cpu":
        report.notes.append(f"Device: {torch.cuda.get_device_name()}, {os.cpu_count()} host cores.")
    wanted = options.part.split(",")
    if "replicas" in wanted:
        replicas(report, options.device, options.seconds)
    if options.mnist and {"cell", "cells"} & set(wanted):
        parts = load.split(options.mnist)
        cell(parts, options.device, 20, 15, "float32", 100)  # the first of a process pays for the libraries
        if "cell" in wanted:
            seeds = range(5)
            for precision, target in (("float32", "<= 4"), ("tf32", "<= 2.5")):
                made = [{"part": "cell", **cell(parts, options.device, 20, 15, precision, seed)} for seed in seeds]
                report.figures += made
                name = f"AGN n=20, λ=15, 40 epochs of MNIST, {precision}"
                report.claims += [
                    measure.Claim.over(
                        f"{name}: seconds (thesis 571)", [m["wall_seconds"] for m in made], unit="s", target=target
                    ),
                    measure.Claim.over(f"{name}: accuracy (thesis .9845)", [m["accuracy"] for m in made]),
                ]
        if "cells" in wanted:
            began = time.perf_counter()
            for workers in GRID:
                for window in GRID:
                    found = cell(parts, options.device, workers, window, "float32", 0)
                    report.figures.append({"part": "cells", **found, "thesis": PUBLISHED.get((workers, window))})
            report.claims.append(
                measure.Claim("all 49 cells of AGN, minutes", (time.perf_counter() - began) / 60, target="<= 5")
            )
    rows = [[claim.what, f"{claim.value:.4g}", claim.target] for claim in report.claims]
    measure.show("The vector engine", ["what", "median", "target"], rows)
    report.write()


if __name__ == "__main__":
    main()
