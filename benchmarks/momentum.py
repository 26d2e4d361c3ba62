"""Implicit momentum of asynchronous descent, measured, and the edge of its stability.

    .venv/bin/python benchmarks/momentum.py [--parts quadratic network]

*quadratic*: DOWNPOUR(1) on a quadratic with memoryless windows, many runs for each number of workers, all of them rows of one
tensor: the regression on their mean path finds momentum without being told the number of workers or the rate. Beside it:
the same by plain least squares, on single runs, and YellowFin's estimator on *plain* SGD that is told it is n workers.
Then, for n equal workers in turn, the largest stable rate by bisection.
*network*: the same regression on real runs of the vector engine, with exponential windows, mini-batches and plain SGD: a linear
softmax and a small tanh MLP on digits, in float64, hundreds of runs that start at one point and differ in their seed.
A part that is not run is kept from the results that are there. Writes results/momentum.json,
docs/figures/momentum.png and docs/figures/stability.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
import torch
from torch import nn
from watch import Watched

import paragrad as pg
from paragrad.analysis import figures, momentum, stability
from paragrad.core.center import Center
from paragrad.data import load

WORKERS = (1, 2, 4, 8, 16, 32, 64)
EDGES = range(1, 17)
CURVATURE = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)
RATE_OF_PLAIN_SGD = 0.02
SINGLES = 200
"""Runs that are looked at one by one."""

PARTS = ("quadratic", "network")
NETWORKS = {
    "linear softmax on digits": lambda: nn.Linear(64, 10),
    "tanh MLP 64-8-10 on digits": lambda: nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)),
}
NETWORK_WORKERS = (1, 2, 4, 8)
ROWS, BATCH = 640, 64


def study(workers: int, runs: int, seed: int) -> dict[str, float]:
    """Everything about one number of workers; the rate is 1/n, so that the mean path swings and dies out in 8n updates."""
    began = time.monotonic()
    setting = {"updates": 8 * workers + 8, "rate": 1 / workers, "curvature": CURVATURE}
    means = momentum.quadratic_means(workers, runs, seed=seed, **setting)
    found = momentum.regress(means, CURVATURE * means)
    plain = momentum.regress(means, CURVATURE * means, lagged=False)
    return {
        "part": "quadratic",
        "workers": workers,
        "expected": 1 - 1 / workers,
        "momentum": found.value,
        "momentum_error": found.error,
        "standard_errors_off": (found.value - 1 + 1 / workers) / found.error if workers > 1 else 0.0,
        "rate_times_n": found.rate * workers / setting["rate"],
        "rate_times_n_error": found.rate_error * workers / setting["rate"],
        "least_squares": plain.value,
        "least_squares_error": plain.error,
        "single_run_least_squares": single(workers, seed, **setting),
        "circular_yellowfin_of_plain_sgd": circular(workers),
        "runs": runs,
        "updates": setting["updates"],
        "seconds": time.monotonic() - began,
    }


def single(workers: int, seed: int, **setting: object) -> float:
    """What least squares reads on one run alone: the median over some."""
    paths = momentum.quadratic_means(workers, SINGLES, seed=seed + 1, groups=SINGLES, **setting)  # type: ignore[arg-type]
    # Two groups that are the same run: the fit of their mean is the fit of that run.
    twice = [path.expand(2, *path.shape) for path in paths]
    return statistics.median(momentum.regress(path, CURVATURE * path, lagged=False).value for path in twice)


def circular(claimed: int) -> float:
    """YellowFin's estimator on plain SGD of one process that is told it is so many workers."""
    rate = RATE_OF_PLAIN_SGD
    order = [torch.zeros(1, dtype=torch.int64)] * 50
    start = torch.ones(1, len(CURVATURE), dtype=torch.float64)
    path = torch.cat(list(momentum.walk(start, order, workers=1, rate=rate, curvature=CURVATURE)))
    return float(momentum.yellowfin(path, CURVATURE * path, rate=rate / claimed).median())


# -- a network ------------------------------------------------------------------------------------------------------


def network(name: str) -> nn.Module:
    """The model at the point that every run starts from."""
    torch.manual_seed(0)
    return NETWORKS[name]().double()


def path_of(
    name: str, workers: int, *, updates: int, rate: float, seed: int, data: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The center of one run of the real engine, at its start and after each update: [updates + 1, parameters]."""
    module = network(name)
    path = [nn.utils.parameters_to_vector(module.parameters()).detach()]

    def look(center: Center, seconds: float) -> bool:
        path.append(center.value.clone())
        return len(path) > updates

    engine = Watched(workers=workers, mode="loop", threads=1, cluster=pg.Cluster(speeds=pg.Exponential(1.0)), look=look)
    with tempfile.TemporaryDirectory(prefix="paragrad-bench-") as folder:
        pg.train(
            module,
            data,
            loss=nn.CrossEntropyLoss(),
            scheme=pg.Downpour(window=1),
            engine=engine,
            optimizer=f"sgd:lr={rate}",
            epochs=1 + (updates + workers) * BATCH // ROWS,
            batch_size=BATCH,
            seed=seed,
            run=pg.Run(out=Path(folder) / "run", validate_every=None, checkpoint_every=None),
            verbose=0,
        )
    return torch.stack(path)


def network_study(name: str, workers: int, runs: int, seed: int) -> dict[str, Any]:
    """The regression on repeated runs of a network; the rate falls like 1/√n, so that the mean path bends in 8n updates."""
    began = time.monotonic()
    rows = load.split("digits").train
    x, y = rows.batch(torch.arange(ROWS).numpy())
    data, rate, updates = (x.double(), y), workers**-0.5, 8 * workers + 8
    seeds = range(seed, seed + runs)
    paths = torch.stack([path_of(name, workers, updates=updates, rate=rate, seed=each, data=data) for each in seeds])
    gradients = momentum.gradients_along(paths, network(name), nn.CrossEntropyLoss(), *data)
    found = momentum.of_runs(paths, gradients)
    plain = momentum.of_runs(paths, gradients, lagged=False)
    with torch.no_grad():
        losses = [float(nn.functional.cross_entropy(_at(name, paths[:, k].mean(0))(data[0]), y)) for k in (0, -1)]
    return {
        "part": "network",
        "model": name,
        "workers": workers,
        "expected": 1 - 1 / workers,
        "momentum": found.value,
        "momentum_error": found.error,
        "standard_errors_off": (found.value - 1 + 1 / workers) / found.error,
        "rate_times_n": found.rate * workers / rate,
        "rate_times_n_error": found.rate_error * workers / rate,
        "least_squares": plain.value,
        "least_squares_error": plain.error,
        "rate": rate,
        "rows": ROWS,
        "batch_size": BATCH,
        "loss_at_start": losses[0],
        "loss_at_end_of_mean_path": losses[1],
        "parameters": paths.shape[-1],
        "runs": runs,
        "updates": updates,
        "seconds": time.monotonic() - began,
    }


def _at(name: str, point: torch.Tensor) -> nn.Module:
    module = network(name)
    nn.utils.vector_to_parameters(point, module.parameters())
    return module


# -- all of it ------------------------------------------------------------------------------------------------------


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of the parts that were asked for, and those of the others as they are."""
    found = []
    if set(options.parts) < set(PARTS) and Path(options.out).exists():
        before = json.loads(Path(options.out).read_text(encoding="utf-8"))["repeats"]
        found = [row for row in before if row["part"] not in options.parts]
    if "quadratic" in options.parts:
        found += [study(workers, options.runs, options.seed) for workers in WORKERS]
        edges = {n: (stability.find_edge(n), stability.edge(n)) for n in EDGES}
        found += [{"part": "quadratic", "workers": n, "edge_found": e, "edge_formula": f} for n, (e, f) in edges.items()]
    if "network" in options.parts:
        torch.set_num_threads(1)
        for name in NETWORKS:
            for workers in NETWORK_WORKERS:
                found.append(network_study(name, workers, options.network_runs, options.seed))
                print(f"{name}, {workers} workers: {found[-1]['seconds']:.0f} s", flush=True)
    return found


def draw(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Both figures."""

    def reading(row: dict[str, Any]) -> momentum.Momentum:
        # JSON keeps six digits, fewer than the distance from the law has.
        value = row["expected"] + row["standard_errors_off"] * row["momentum_error"]
        return momentum.Momentum(value, row["momentum_error"], row["rate_times_n"], row["rate_times_n_error"])

    readings = {
        row["workers"]: figures.Reading(reading(row), row["single_run_least_squares"], row["circular_yellowfin_of_plain_sgd"])
        for row in rows
        if "single_run_least_squares" in row
    }
    networks = {
        name: {row["workers"]: reading(row) for row in rows if row.get("model") == name}
        for name in dict.fromkeys(row["model"] for row in rows if "model" in row)
    }
    figures.momentum(folder / "momentum.png", readings, networks)
    figures.stability(folder / "stability.png", {row["workers"]: row["edge_found"] for row in rows if "edge_found" in row})


def show(rows: list[dict[str, Any]]) -> None:
    """Three tables."""

    def said(row: dict[str, Any], key: str, digits: int) -> str:
        return f"{row[key]:.{digits}f} ± {row[f'{key}_error']:.{digits}f}"

    measure.show(
        "Implicit momentum on a quadratic",
        ("workers", "runs", "1 - 1/n", "momentum", "ρ n/η", "least squares", "single run", "YellowFin (circular)"),
        [
            (
                str(row["workers"]),
                f"{row['runs']:,}",
                f"{row['expected']:.5f}",
                said(row, "momentum", 6),
                said(row, "rate_times_n", 4),
                said(row, "least_squares", 5),
                f"{row['single_run_least_squares']:.2f}",
                f"{row['circular_yellowfin_of_plain_sgd']:.3f}",
            )
            for row in rows
            if "single_run_least_squares" in row
        ],
    )
    measure.show(
        "Largest stable rate x curvature, equal workers in turn",
        ("workers", "found", "2 sin(π/(4n - 2))"),
        [
            (str(row["workers"]), f"{row['edge_found']:.6f}", f"{row['edge_formula']:.6f}")
            for row in rows
            if "edge_found" in row
        ],
    )
    measure.show(
        "Implicit momentum of networks, real runs of the vector engine",
        ("model", "workers", "runs", "1 - 1/n", "momentum", "off (s.e.)", "ρ n/η", "least squares"),
        [
            (
                row["model"],
                str(row["workers"]),
                str(row["runs"]),
                f"{row['expected']:.3f}",
                said(row, "momentum", 4),
                f"{row['standard_errors_off']:+.1f}",
                said(row, "rate_times_n", 3),
                said(row, "least_squares", 3),
            )
            for row in rows
            if "model" in row
        ],
    )


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=None, repeats=1)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--runs", type=int, default=100_000, help="for each number of workers (default %(default)s)")
    parser.add_argument("--network-runs", type=int, default=320, help="of each network, likewise (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "figures")
    options = parser.parse_args()
    folder = options.figures
    del options.figures
    report = measure.Report("momentum", options)
    report.figures = measured(options)
    draw(folder, report.figures)
    show(report.figures)
    report.write()


if __name__ == "__main__":
    main()
