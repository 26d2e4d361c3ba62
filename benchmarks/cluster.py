"""Before you book the cluster: virtual seconds to a common accuracy on three simulated clusters of 8 workers.

    .venv/bin/python benchmarks/cluster.py [--mnist FILE.npz]

SyncSGD, BackupWorkers, AGN, AEASGD and AsyncDiLoCo on the clusters *homogeneous*, *straggler* and *heterogeneous*, with the
vector engine: a step of a usual machine takes 1 virtual second, messages take no time, and the center is looked at at every
full second. Each scheme has the best of six settings on each cluster, found with seeds of their own by the same measure;
the same rows and epochs for all. Writes results/cluster.json, docs/figures/cluster.png and the tables of docs/choosing.md;
``--page`` does only the latter two, from the results that are there.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    sys.path.insert(0, str(ROOT))
from benchmarks import measure  # noqa: E402
from benchmarks.watch import Watched  # noqa: E402

import paragrad as pg  # noqa: E402
from paragrad import schemes  # noqa: E402
from paragrad.analysis import figures  # noqa: E402
from paragrad.cluster import PROFILES  # noqa: E402
from paragrad.config import options  # noqa: E402
from paragrad.core.center import Center  # noqa: E402
from paragrad.data import load  # noqa: E402
from paragrad.data.source import Source  # noqa: E402
from paragrad.models import builtin  # noqa: E402

CLUSTERS = ("homogeneous", "straggler", "heterogeneous")
WORKERS = 8
TUNING = (1000, 1001)
"""Seeds that settings are chosen with, and nothing is measured."""
PAGE = ROOT / "docs" / "choosing.md"
FIGURE = ROOT / "docs" / "figures" / "cluster.png"

TASKS: dict[str, dict[str, Any]] = {
    "digits": {"shape": (64,), "epochs": 20, "batch_size": 16, "target": 0.95, "rate": 0.025},
    "mnist": {"shape": (28, 28), "epochs": 3, "batch_size": 32, "target": 0.90, "rate": 0.0125},
}
"""An MLP with 128 hidden units on both; ``rate`` is the middle of the rates of Adam that are tried."""
SAID = {"digits": "digits, 20 epochs of 1,437 rows", "mnist": "MNIST, 3 epochs of 8,000 rows"}
TRAINING, TEST = 8_000, 1_000
"""Rows of MNIST."""

FIELDS: dict[str, tuple[str, ...]] = {
    "SyncSGD": ("",),
    "BackupWorkers": ("backups=1", "backups=2"),
    "AGN": ("window=3", "window=8"),
    "AEASGD": ("window=5,alpha=0.1", "window=5,alpha=0.4"),
    "AsyncDiLoCo": tuple(f"window=5,outer_lr=0.5,outer_momentum=0.5{more}" for more in ("", ",dylu=true")),
}
"""What is tried for each scheme, with three rates of Adam; SyncSGD, which has no field, with six."""


def grid(name: str, task: str) -> list[tuple[str, str]]:
    """Six settings: scheme and optimiser."""
    factors = (0.5, 1, 2) if len(FIELDS[name]) > 1 else (0.25, 0.5, 1, 2, 4, 8)
    rates = [TASKS[task]["rate"] * factor for factor in factors]
    return [(f"{name.lower()}:{fields}".rstrip(":"), f"adam:lr={rate:g}") for fields in FIELDS[name] for rate in rates]


NOTES = (
    "Rows go to the worker that asks first (partition='stolen') in every scheme, including the synchronous ones. The part "
    "'dealt' is BackupWorkers with rows dealt beforehand: the rows of a slow worker are then trained last.",
    "AsyncDiLoCo's outer rate and momentum of 0.5 were chosen before, among five pairs on digits with a straggler. With the "
    "default momentum of 0.9 and about 45 outer steps in all, it overshot the target or was late.",
)


# -- one run --------------------------------------------------------------------------------------------------------


class Looks:
    """Accuracy of the center at each full virtual second: as it is after all that happened up to then."""

    def __init__(self, model: torch.nn.Module, rows: Source, target: float, *, stop: bool) -> None:
        self.model, self.target, self.stop = model, target, stop
        self.x, self.y = rows.batch(np.arange(len(rows)))
        self.reached: float | None = None
        self.last = torch.empty(0)
        self.due = math.inf
        """The full second at which the last center is looked at, unless another comes before."""

    def __call__(self, center: Center, seconds: float) -> bool:
        if self.reached is not None:
            return False
        if seconds > self.due:
            self.look()
        self.last, self.due = center.value.clone(), float(math.ceil(seconds))
        return self.stop and self.reached is not None

    def look(self) -> None:
        """At the last center that was seen."""
        torch.nn.utils.vector_to_parameters(self.last, self.model.parameters())
        with torch.no_grad():
            accuracy = float((self.model(self.x).argmax(1) == self.y).double().mean())
        if self.reached is None and accuracy >= self.target:
            self.reached = self.due


def train(
    task: str,
    cluster: str,
    spec: str,
    optimizer: str,
    seed: int,
    parts: load.Split,
    *,
    partition: Any = "stolen",
    stop: bool = False,
) -> dict[str, Any]:
    """One run; one that diverges, or does not reach the target, is a figure too."""
    assert parts.validation is not None
    setting = TASKS[task]
    model = builtin.build("mlp", setting["shape"], 10, seed=seed)
    looks = Looks(builtin.build("mlp", setting["shape"], 10), parts.validation, setting["target"], stop=stop)
    found: dict[str, Any] = {"task": task, "cluster": cluster, "scheme": spec, "optimizer": optimizer, "seed": seed}
    found |= {"partition": partition, "to_target": None, "accuracy": None}
    with tempfile.TemporaryDirectory(prefix="paragrad-bench-") as folder:
        try:
            result = pg.train(
                model,
                parts.train,
                validation=parts.validation,
                scheme=options.parse(spec, "scheme", schemes),
                engine=Watched(workers=WORKERS, cluster=PROFILES[cluster], threads=1, look=looks),
                optimizer=optimizer,
                epochs=setting["epochs"],
                batch_size=setting["batch_size"],
                seed=seed,
                run=pg.Run(out=Path(folder) / "run", partition=partition, validate_every=None, checkpoint_every=None),
                verbose=0,
            )
        except pg.Diverged:
            return found
    looks.look()
    toll = result.summary["cluster"]
    idle, computing = sum(toll["idle_seconds"]), sum(toll["computing_seconds"])
    return found | {
        "to_target": looks.reached,
        "accuracy": result.accuracy,
        "seconds": result.summary["seconds"],
        "idle_share": idle / (idle + computing),
        "staleness": result.summary["staleness"]["mean"],
        "dropped": result.summary["dropped_commits"],
    }


@cache
def data(task: str, mnist: str | None, seed: int) -> load.Split:
    """Rows to train and to look at."""
    if task == "digits":
        return load.split("digits", None, 0.2, seed)
    whole = load.split(mnist, None, None, seed)
    assert whole.validation is not None
    draw = np.random.default_rng(seed)
    train, test = (
        part.select(draw.permutation(len(part))[:count]) for part, count in ((whole.train, TRAINING), (whole.validation, TEST))
    )
    return replace(whole, train=train, validation=test)


def best(runs: list[dict[str, Any]]) -> tuple[str, str]:
    """The setting that reached the target most often, then soonest on average, then was most accurate in the end."""

    def order(setting: tuple[str, str]) -> tuple[float, float, float]:
        mine = [run for run in runs if (run["scheme"], run["optimizer"]) == setting]
        times = [run["to_target"] for run in mine if run["to_target"] is not None]
        mean = statistics.mean(times) if times else math.inf
        return (-len(times), mean, -statistics.mean(run["accuracy"] or 0.0 for run in mine))

    return min(dict.fromkeys((run["scheme"], run["optimizer"]) for run in runs), key=order)


# -- what is shown --------------------------------------------------------------------------------------------------

Groups = dict[tuple[str, str, str], list[dict[str, Any]]]
"""(task, scheme, cluster) -> the runs of all seeds."""


def grouped(runs: list[dict[str, Any]]) -> Groups:
    """Runs that differ in their seed only, together."""
    found: Groups = {}
    for run in runs:
        if run["part"] == "measured":
            found.setdefault((run["task"], run["name"], run["cluster"]), []).append(run)
    return found


def cell(runs: list[dict[str, Any]]) -> str:
    """Virtual seconds to the target: median, smallest and largest, and how often it was not reached."""
    times = [run["to_target"] for run in runs if run["to_target"] is not None]
    missed = f"{len(runs) - len(times)} of {len(runs)} did not" if len(times) < len(runs) else ""
    return " ".join(part for part in (measure.spread(times, 0) if times else "", missed) if part)


def middle(runs: list[dict[str, Any]], key: str, scale: float = 1.0, digits: int = 0) -> str:
    """The median of a figure."""
    values = [scale * run[key] for run in runs if run.get(key) is not None]
    return f"{statistics.median(values):.{digits}f}" if values else "-"


def rows(groups: Groups, task: str) -> list[list[str]]:
    """One row a scheme and cluster."""
    return [
        [
            name,
            cluster,
            cell(runs),
            middle(runs, "seconds"),
            middle(runs, "idle_share", 100),
            middle(runs, "accuracy", 100, 1),
            f"{runs[0]['scheme']}, {runs[0]['optimizer']}",
        ]
        for cluster in CLUSTERS
        for name in FIELDS
        if (runs := groups.get((task, name, cluster)))
    ]


HEADS = ("scheme", "cluster", "seconds to target", "whole run (s)", "idle (%)", "accuracy (%)", "setting")


def markdown(result: Mapping[str, Any]) -> str:
    """The tables of docs/choosing.md."""
    groups = grouped(result["repeats"])
    lines = []
    for task in dict.fromkeys(task for task, _, _ in groups):
        target = f"{100 * TASKS[task]['target']:.0f} %"
        lines += [f"{SAID[task]}, target {target}:", "", "| scheme | " + " | ".join(CLUSTERS) + " |", "|---" * 4 + "|"]
        for name in FIELDS:
            cells = [groups.get((task, name, cluster), []) for cluster in CLUSTERS]
            said = [f"{cell(runs)}; idle {middle(runs, 'idle_share', 100)} %" if runs else "" for runs in cells]
            lines.append(f"| `{name}` | " + " | ".join(said) + " |")
        lines.append("")
    return "\n".join([*lines, f"`{result['command']}` repeats it."])


def write_page(result: Mapping[str, Any]) -> None:
    """Put the tables between the two marks of docs/choosing.md."""
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition("<!-- cluster -->\n")
    _, end, after = rest.partition("<!-- end of cluster -->\n")
    if not mark or not end:
        raise SystemExit(f"{PAGE.name} has lost its marks <!-- cluster --> and <!-- end of cluster -->.")
    PAGE.write_text(f"{before}{mark}{markdown(result)}\n{end}{after}", encoding="utf-8")


def draw(result: Mapping[str, Any]) -> None:
    """Seconds to the target as bars, a group for each cluster, from the fastest seed to the slowest."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    groups = grouped(result["repeats"])
    tasks = list(dict.fromkeys(task for task, _, _ in groups))
    with rc_context(figures.STYLE):
        figure = Figure(figsize=(5.2 * len(tasks) + 1.5, 4))
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            for place, name in enumerate(FIELDS):
                _bars(axes, place, name, [groups.get((task, name, cluster), []) for cluster in CLUSTERS])
            axes.set_xticks(range(len(CLUSTERS)), CLUSTERS)
            axes.set(ylabel=f"virtual seconds to {100 * TASKS[task]['target']:.0f} % accuracy", title=SAID[task])
            axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize=9, loc="outside upper center", ncols=len(FIELDS))
        figure.savefig(FIGURE)


def _bars(axes: Any, place: int, name: str, clusters: list[list[dict[str, Any]]]) -> None:
    width = 0.8 / len(FIELDS)
    colour = figures.COLOURS[place]
    for where, runs in enumerate(clusters):
        at = where + (place - (len(FIELDS) - 1) / 2) * width
        times = [run["to_target"] for run in runs if run["to_target"] is not None]
        if 2 * len(times) <= len(runs):
            axes.text(at, 2, " not reached", rotation=90, ha="center", va="bottom", color=colour, fontsize=8)
            continue
        high = statistics.median(times)
        axes.bar(at, high, 0.9 * width, color=colour, label=name if where == 0 else None)
        axes.errorbar(at, high, [[high - min(times)], [max(times) - high]], color=figures.INK, lw=1, capsize=2)
        missed = f" ({len(times)}/{len(runs)})" if len(times) < len(runs) else ""
        axes.annotate(f"{high:.0f}{missed}", (at, max(times)), (0, 3), textcoords="offset points", ha="center", fontsize=7.5)


# -- all of it ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=None, repeats=5)
    parser.add_argument("--mnist", help="an .npz with x_train, y_train, x_test, y_test; without it digits alone")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run at a time (default %(default)s)")
    parser.add_argument("--page", action="store_true", help="only draw and write the page from the results that are there")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if not chosen.page:
        search(chosen)
    result = json.loads(Path(chosen.out).read_text(encoding="utf-8"))
    draw(result)
    write_page(result)
    groups = grouped(result["repeats"])
    for task in dict.fromkeys(task for task, _, _ in groups):
        setting = f"{SAID[task]}, target {TASKS[task]['target']:.2f}, {WORKERS} workers"
        measure.show(f"{setting}: median (min-max) of the seeds", HEADS, rows(groups, task))


def search(chosen: Any) -> None:
    """Choose settings with some seeds, measure them with others; several groups of runs at a time."""
    report = measure.Report("cluster", chosen)
    mnist, chosen.mnist = chosen.mnist, chosen.mnist and Path(chosen.mnist).name
    jobs, seeds = chosen.jobs, range(chosen.repeats)
    del chosen.page, chosen.jobs
    tasks = ("digits", "mnist") if mnist else ("digits",)
    groups = [(task, cluster, name) for task in tasks for cluster in CLUSTERS for name in FIELDS]
    began = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(study, *group, seeds, mnist) for group in groups]
        extra = [pool.submit(dealt, task, mnist) for task in tasks]
        for group, found in zip(groups, waiting, strict=True):
            report.figures += found.result()
            said = cell([run for run in found.result() if run["part"] == "measured"])
            print(f"{time.monotonic() - began:5.0f} s  {' '.join(group)}: {said}", flush=True)
        report.figures += [run for found in extra for run in found.result()]
    report.notes += NOTES
    report.write()


def study(task: str, cluster: str, name: str, seeds: Sequence[int], mnist: str | None) -> list[dict[str, Any]]:
    """One scheme on one cluster: all settings with some seeds, the best of them with others."""
    torch.set_num_threads(1)
    about = {"part": "tuning", "name": name}
    tried = [
        about | train(task, cluster, *setting, seed, data(task, mnist, seed), stop=True)
        for setting in grid(name, task)
        for seed in TUNING
    ]
    about["part"] = "measured"
    return tried + [about | train(task, cluster, *best(tried), seed, data(task, mnist, seed)) for seed in seeds]


def dealt(task: str, mnist: str | None) -> list[dict[str, Any]]:
    """BackupWorkers as it is by default, beside a straggler."""
    torch.set_num_threads(1)
    setting, about = grid("BackupWorkers", task)[1], {"part": "dealt", "name": "BackupWorkers"}
    return [about | train(task, "straggler", *setting, seed, data(task, mnist, seed), partition="dealt") for seed in range(2)]


if __name__ == "__main__":
    main()
