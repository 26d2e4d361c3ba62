"""The vector engine on a GPU: many replicas at once, the thesis's cells end to end, beside what a user would do instead.

    .venv/bin/python benchmarks/vector.py --mnist FILE.npz [--device cuda] [--part replicas,cell,cells]
    .venv/bin/python benchmarks/vector.py --device cpu --part models,toy --seconds 2 --out benchmarks/results/vector_cpu.json

*replicas*: 512 replicas of an MLP 784-600-600-10, batch 64, SGD, microseconds a worker-step, timed with device events after a
warm-up; beside one replica after another in plain PyTorch on the same device, 16 processes that each train one replica and do
not even talk, and DistributedDataParallel with 4 processes (gloo: NCCL wants a device for each).
*cell*: the thesis's n = 20, λ = 15 (MLP 784-1000-2000-1000-10, Adam, mini-batches of 128, 40 epochs in total over all workers,
MNIST) with the real center and scheme, seconds from the start barrier to the last commit; 5 seeds.
*cells*: all 49 of n, λ = 10, 15, ..., 40.
*scatter*: cells that collapse where workers are exactly equally fast, again with steps that scatter; 3 seeds.
*models*: on the CPU, what the engine does of itself against looping over replicas, for models of several kinds.
*toy*: on the CPU, 1,000 workers on a quadratic with exponential windows, events a second against a bare heap loop with the same
tensor operations and nothing else: no center, no leases, no record. Once its exchange is in plain torch (*bare*), once it is
the engine's own pass in C (*bare_pass*), which is the stricter peer.
"""

from __future__ import annotations

import heapq
import math
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
from paragrad.core import kernels
from paragrad.data import load
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.learners.rows import Task, TorchRows
from paragrad.learners.torch import TorchLearner
from paragrad.models import builtin, losses, toys
from paragrad.types import Vector

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
    learner = TorchLearner(builtin.build(SIZES, (784,), 10), nn.CrossEntropyLoss(), "sgd:lr=0.01")
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


def cell(
    parts: load.Split, device: str, workers: int, window: int, precision: Any, seed: int, jitter: float = 0.0
) -> dict[str, Any]:
    """One cell of the thesis, end to end; with ``jitter``, the workers' steps scatter."""
    cluster = pg.Cluster(speeds=pg.LogNormal(1.0, jitter) if jitter else 1.0)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = pg.train(
            builtin.build(THESIS, (28, 28), 10, seed),
            parts.train,
            validation=parts.validation,
            optimizer="adam:lr=0.001",
            scheme=pg.AGN(window=window),
            engine=pg.Vector(workers=workers, device=device, precision=precision, cluster=cluster),
            epochs=40,
            batch_size=128,
            seed=seed,
            run=pg.Run(out=Path(folder) / "run", validate_every=None, checkpoint_every=None),
            verbose=0,
        )
    found = {
        "workers": workers,
        "window": window,
        "precision": precision,
        "jitter": jitter,
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


MODELS = [
    ("quadratic:curvatures=(1.0,10.0)", 1),
    ("linear", 32),
    ("mlp:16", 32),
    ("mlp:128", 32),
    ("mlp:512", 32),
    ("mlp:600-600", 32),
    ("cnn", 32),
    ("resnet8", 16),
]
"""What is trained on the CPU, and a worker's mini-batch: rows of 64 pixels, but for the toy."""


def looped(report: measure.Report, workers: int, seconds: float) -> None:
    """Rows a second on the CPU: auto and together, against one replica after another."""
    for _ in range(report.options.repeats):
        for spec, batch in MODELS:
            found: dict[str, Any] = {"part": "models", "model": spec, "workers": workers}
            for mode in ("loop", "auto", "together"):
                found[mode] = _rate_of(spec, batch, workers, mode, seconds)
            report.figures.append(found)
            print(found, flush=True)
    for spec, _ in MODELS:
        mine = [figures for figures in report.figures if figures.get("model") == spec]
        ratios = [figures["auto"] / figures["loop"] for figures in mine]
        report.claims.append(measure.Claim.over(f"CPU, {spec}, {workers} workers: rate / looping", ratios, target=">= 0.9"))


def _rate_of(spec: str, batch: int, workers: int, mode: Any, seconds: float) -> float:
    toy = toys.is_toy(spec)
    began: list[float] = []
    counted = [0]

    def watch(event: pg.Event) -> bool:
        if event.kind == "go":
            began.append(time.perf_counter())
        if event.kind == "commit":
            counted[0] += event.data["rows"]
        return bool(began) and time.perf_counter() - began[0] > seconds

    with tempfile.TemporaryDirectory() as folder:
        result = pg.train(
            toys.build(spec) if toy else builtin.build(spec, (64,), 10),
            "noise:rows=4000" if toy else "digits",
            optimizer="sgd:lr=0.0001",
            scheme=pg.AGN(window=5),
            engine=pg.Vector(workers=workers, mode=mode, threads=1),
            epochs=1000,
            batch_size=batch,
            run=pg.Run(out=Path(folder) / "run", validate_every=None, checkpoint_every=None, callbacks=(watch,)),
            verbose=0,
        )
    return counted[0] / float(result.summary["wall_seconds"])


def toy(report: measure.Report, workers: int, events: int) -> None:
    """Events a second with a thousand workers, beside a bare heap loop with its exchange in torch, and with our pass in C."""
    for _ in range(report.options.repeats):
        found: dict[str, Any] = {"part": "toy", "workers": workers, "compiled": kernels.compiled()}
        found["ours"] = _simulated(workers, events)
        for peer, exchange in PEERS.items():
            found[peer] = _bare(workers, events, exchange)
        report.figures.append(found)
        print(found, flush=True)
    mine = [figures for figures in report.figures if figures["part"] == "toy"]
    for peer, name in (("bare", "bare heap loop"), ("bare_pass", "bare heap loop with the engine's pass in C")):
        ratios = [figures["ours"] / figures[peer] for figures in mine]
        what = f"CPU, a quadratic with {workers:,} workers: events / {name}"
        report.claims.append(measure.Claim.over(what, ratios, target=">= 0.4"))


def _simulated(workers: int, events: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        result = pg.train(
            toys.Quadratic(curvatures=(1.0, 10.0)),
            f"noise:rows={events}",
            optimizer="sgd:lr=0.0001",
            scheme=pg.Downpour(window=1),
            batch_size=1,
            engine=pg.Vector(workers=workers, threads=1, cluster=pg.Cluster(speeds=pg.Exponential(1.0))),
            run=pg.Run(out=Path(folder) / "run", validate_every=None, checkpoint_every=None),
            verbose=0,
        )
    return float(result.summary["commits"] / result.summary["wall_seconds"])


def _exchange_in_torch(out: Vector, anchor: Vector, local: Vector, now: Vector, scale: float) -> bool:
    """What ``kernels.move`` does, as one would write it."""
    torch.add(now, local.sub_(anchor), alpha=scale, out=out)
    anchor.copy_(out)
    local.copy_(out)
    return math.isfinite(out.sum().item())


PEERS = {"bare": _exchange_in_torch, "bare_pass": kernels.move}
"""The exchange of a bare heap loop: out = anchor = local = now + scale * (local - anchor), and whether that is finite."""


def _bare(workers: int, events: int, exchange: Callable[[Vector, Vector, Vector, Vector, float], bool]) -> float:
    """A heap of (time, worker), all due windows computed at once, each commit's passes over its vectors; and nothing else."""
    torch.set_num_threads(1)
    data = load.split(f"noise:rows={events}", width=2).train
    plan = Plan(events, 1, 1)
    learner = TorchLearner(toys.Quadratic(curvatures=(1.0, 10.0)), losses.build("value"), "sgd:lr=0.0001")
    rows = TorchRows(learner, workers, data, plan)
    homes = [rows.weights[rank] for rank in range(workers)]
    anchors = [learner.weights.clone() for _ in range(workers)]
    center, spare = learner.weights.clone(), learner.weights.clone()
    draws = [pg.Cluster(speeds=pg.Exponential(1.0)).steps(rank, 0, 0) for rank in range(workers)]
    heap = [(draws[rank].total(1), rank) for rank in range(workers)]
    heapq.heapify(heap)
    batches = iter(range(events))
    batch = [next(batches) for _ in range(workers)]
    due, waiting = set(range(workers)), list(range(workers))
    began = time.perf_counter()
    for _ in range(events):
        now, rank = heapq.heappop(heap)
        if rank in due:
            rows.run([Task(row, (batch[row],)) for row in waiting])
            due.clear()
            waiting = []
        if not exchange(spare, anchors[rank], homes[rank], center, 1.0):
            raise FloatingPointError
        center, spare = spare, center
        following = next(batches, None)
        if following is not None:
            batch[rank] = following
            due.add(rank)
            waiting.append(rank)
            heapq.heappush(heap, (now + draws[rank].total(1), rank))
    return events / (time.perf_counter() - began)


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
    if options.mnist and {"cell", "cells", "scatter"} & set(wanted):
        parts = load.split(options.mnist)
        cell(parts, options.device, 20, 15, "float32", 100)  # the first of a process pays for the libraries
        if "cell" in wanted:
            seeds = range(5)
            for precision, jitter, target in (("float32", 0.0, "<= 4"), ("tf32", 0.0, "<= 2.5"), ("float32", 0.2, "")):
                made = [{"part": "cell", **cell(parts, options.device, 20, 15, precision, seed, jitter)} for seed in seeds]
                report.figures += made
                name = f"AGN n=20, λ=15, 40 epochs of MNIST, {precision}" + ", steps that scatter (log-normal, 0.2)" * bool(
                    jitter
                )
                report.claims += [
                    measure.Claim.over(
                        f"{name}: seconds (thesis 571)", [m["wall_seconds"] for m in made], unit="s", target=target
                    ),
                    measure.Claim.over(f"{name}: accuracy (thesis .9845)", [m["accuracy"] for m in made]),
                ]
        if "scatter" in wanted:
            for workers, window in ((30, 10), (40, 10)):
                for jitter in (0.0, 0.2, 0.5):
                    seeds = range(3)
                    made = [cell(parts, options.device, workers, window, "float32", seed, jitter) for seed in seeds]
                    report.figures += [{"part": "scatter", **found, "thesis": PUBLISHED[workers, window]} for found in made]
        if "cells" in wanted:
            began = time.perf_counter()
            for workers in GRID:
                for window in GRID:
                    found = cell(parts, options.device, workers, window, "float32", 0)
                    report.figures.append({"part": "cells", **found, "thesis": PUBLISHED.get((workers, window))})
            report.claims.append(
                measure.Claim("all 49 cells of AGN, minutes", (time.perf_counter() - began) / 60, target="<= 5")
            )
    if "models" in wanted:
        looped(report, 16, options.seconds)
    if "toy" in wanted:
        toy(report, 1000, 30_000)
    rows = [[claim.what, f"{claim.value:.4g}", claim.target] for claim in report.claims]
    measure.show("The vector engine", ["what", "median", "target"], rows)
    report.write()


if __name__ == "__main__":
    main()
