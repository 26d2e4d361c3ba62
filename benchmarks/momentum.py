"""Implicit momentum of asynchronous descent, measured, and the edge of its stability.

    .venv/bin/python benchmarks/momentum.py

DOWNPOUR(1) on a quadratic with memoryless windows, thousands of runs for each number of workers, all of them rows of one
tensor: the regression on their mean path finds momentum without being told the number of workers or the rate. Beside it:
the same by plain least squares, on single runs, and YellowFin's estimator on *plain* SGD that is told it is n workers.
Then, for n equal workers in turn, the largest stable rate by bisection. Writes results/momentum.json,
docs/figures/momentum.png and docs/figures/stability.png.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import measure
import torch

from paragrad.analysis import figures, momentum, stability

WORKERS = (1, 2, 4, 8, 16, 32, 64)
EDGES = range(1, 17)
CURVATURE = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)
RATE_OF_PLAIN_SGD = 0.02
SINGLES = 200
"""Runs that are looked at one by one."""


def study(workers: int, runs: int, seed: int) -> dict[str, float]:
    """Everything about one number of workers; the rate is 1/n, so that the mean path swings and dies out in 8n updates."""
    began = time.monotonic()
    setting = {"updates": 8 * workers + 8, "rate": 1 / workers, "curvature": CURVATURE}
    means = momentum.quadratic_means(workers, runs, seed=seed, **setting)
    found = momentum.regress(means, CURVATURE * means)
    plain = momentum.regress(means, CURVATURE * means, lagged=False)
    return {
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


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=None, repeats=1)
    parser.add_argument("--runs", type=int, default=100_000, help="for each number of workers (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "figures")
    options = parser.parse_args()
    folder = options.figures
    del options.figures
    report = measure.Report("momentum", options)
    report.figures = [study(workers, options.runs, options.seed) for workers in WORKERS]
    edges = {n: stability.find_edge(n) for n in EDGES}
    report.figures += [{"workers": n, "edge_found": found, "edge_formula": stability.edge(n)} for n, found in edges.items()]
    readings = {
        row["workers"]: figures.Reading(
            momentum.Momentum(row["momentum"], row["momentum_error"], row["rate_times_n"], row["rate_times_n_error"]),
            row["single_run_least_squares"],
            row["circular_yellowfin_of_plain_sgd"],
        )
        for row in report.figures
        if "momentum" in row
    }
    figures.momentum(folder / "momentum.png", readings)
    figures.stability(folder / "stability.png", edges)
    measure.show(
        f"Implicit momentum, {options.runs:,} runs each",
        ("workers", "1 - 1/n", "momentum", "ρ n/η", "least squares", "single run", "YellowFin (circular)"),
        [
            (
                str(row["workers"]),
                f"{row['expected']:.5f}",
                f"{row['momentum']:.6f} ± {row['momentum_error']:.6f}",
                f"{row['rate_times_n']:.4f} ± {row['rate_times_n_error']:.4f}",
                f"{row['least_squares']:.5f} ± {row['least_squares_error']:.5f}",
                f"{row['single_run_least_squares']:.2f}",
                f"{row['circular_yellowfin_of_plain_sgd']:.3f}",
            )
            for row in report.figures
            if "momentum" in row
        ],
    )
    measure.show(
        "Largest stable rate x curvature, equal workers in turn",
        ("workers", "found", "2 sin(π/(4n - 2))"),
        [(str(n), f"{found:.6f}", f"{stability.edge(n):.6f}") for n, found in edges.items()],
    )
    report.write()


if __name__ == "__main__":
    main()
