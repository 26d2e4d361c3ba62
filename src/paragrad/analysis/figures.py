"""Figures of analyses: staleness of a run, implicit momentum, the edge of stability. Needs matplotlib."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from paragrad.analysis.momentum import Momentum
from paragrad.analysis.staleness import Sample, Worker, by_worker
from paragrad.errors import UsageError
from paragrad.plotting import canvas

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMED = 8
"""Up to this many workers have a colour and a name; more workers are thin grey lines."""
BARS = 40
"""Most bars in a histogram."""
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#332288")
"""Paul Tol's bright colours, which colour-blind readers can distinguish."""
INK, ACCENT, WARNING, FAINT = "#333333", "#4477aa", "#cc3311", "#999999"
EXACT = 1e-12
"""A standard error below this is rounding: the path of a single worker is not random."""
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "savefig.dpi": 110,
    "figure.constrained_layout.use": True,
}


def staleness(path: Path, commits: Sequence[Sample], *, virtual: bool = False) -> None:
    """Draw the staleness of the commits of each worker, and the distance of the center meanwhile (or staleness) over time."""
    if not commits:
        raise UsageError("There is nothing to draw: the record has no applied commit.")
    workers = by_worker(commits)
    with _figure(path, width=10, columns=2) as (left, right):
        _histograms(left, workers)
        measured = [sample for sample in commits if sample.distance is not None]
        samples, named = measured or list(commits), len(workers) <= NAMED
        _over_time(right, samples, distance=bool(measured), named=named, virtual=virtual)


def _histograms(axes: Any, workers: Sequence[Worker]) -> None:
    top = max(worker.staleness.max for worker in workers)
    width = -(-(top + 1) // BARS)
    lefts = range(0, top + 1, width)
    for worker in workers:
        look = {"color": COLOURS[worker.worker % len(COLOURS)], "lw": 1.6, "label": f"worker {worker.worker}"}
        if len(workers) > NAMED:
            label = "each worker" if worker is workers[0] else None
            look = {"color": FAINT, "lw": 0.6, "alpha": 0.5, "label": label}
        axes.stairs(_shares(worker.staleness.histogram, lefts), [left - 0.5 for left in (*lefts, lefts[-1] + width)], **look)
    every = sum((worker.staleness.histogram for worker in workers), Counter[int]())
    mean = sum(value * count for value, count in every.items()) / every.total()
    middles = [left + (width - 1) / 2 for left in lefts]
    axes.bar(middles, _shares(every, lefts), width=width, color="#dddddd", zorder=0, label="all workers")
    axes.axvline(mean, color=INK, lw=1, ls=":", label=f"mean {mean:.2f}")
    share = "share of commits (%)" + (f", {width} updates per bar" if width > 1 else "")
    axes.set(xlabel="staleness (updates of the center)", ylabel=share, title="Staleness")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.legend(fontsize=8)


def _shares(histogram: Counter[int], lefts: range) -> list[float]:
    bars = [sum(histogram[value] for value in range(left, left + lefts.step)) for left in lefts]
    return [100 * bar / histogram.total() for bar in bars]


def _over_time(axes: Any, commits: Sequence[Sample], *, distance: bool, named: bool, virtual: bool) -> None:
    heights = [float(sample.distance if distance and sample.distance is not None else sample.staleness) for sample in commits]
    colours = [COLOURS[sample.worker % len(COLOURS)] if named else FAINT for sample in commits]
    axes.scatter(
        [sample.time for sample in commits], heights, s=6, c=colours, lw=0, alpha=0.5 if len(commits) < 2000 else 0.2,
        rasterized=True,
    )  # fmt: skip
    width = max(1, len(commits) // 40)
    blocks = [slice(start, start + width) for start in range(0, len(commits), width)]
    times = [median(sample.time for sample in commits[block]) for block in blocks]
    axes.plot(times, [median(heights[block]) for block in blocks], color=INK, lw=1.5, label="running median")
    if distance:
        axes.set(ylabel="Euclidean norm", title="Distance that the center moved during a window")
    else:
        axes.set(ylabel="staleness (updates)", title="Staleness over time")
        axes.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    top = max(heights) or 1.0
    axes.set(xlabel="virtual seconds" if virtual else "seconds", ylim=(-0.04 * top, 1.06 * top))
    axes.legend(fontsize=8)


@dataclass(frozen=True)
class Reading:
    """Measurements for one number of workers."""

    measured: Momentum
    single: float
    """Plain least squares on a single run."""
    circular: float
    """YellowFin's estimate for *plain* SGD, given this number of workers."""


def momentum(path: Path, readings: Mapping[int, Reading], networks: Mapping[str, Mapping[int, Momentum]] | None = None) -> None:
    """Draw measured implicit momentum and 1 - 1/n, and their difference in standard errors.

    ``networks`` are measurements of repeated runs of further models, by name.
    """
    counts = sorted(readings)
    networks = networks or {}
    found = [readings[n].measured for n in counts]
    with _figure(path, width=10, columns=2) as (left, right):
        fine = [2 ** (k / 16) for k in range(16 * math.ceil(math.log2(max(counts))) + 1)]
        (law,) = left.plot(fine, [1 - 1 / n for n in fine], color=FAINT, lw=1.5, label="1 − 1/n", zorder=1)
        errors = [2 * reading.error for reading in found]
        label = "regression on the mean of many runs (± 2 s.e.)"
        measured = left.errorbar(counts, [m.value for m in found], errors, fmt="o", color=ACCENT, ms=6, capsize=4, label=label)
        single = [readings[n].single for n in counts]
        (alone,) = left.plot(
            counts, single, "o", color=ACCENT, mfc="white", ms=6, zorder=0, label="least squares on a single run"
        )
        circular = [readings[n].circular for n in counts]
        label = "YellowFin on plain SGD, given n workers: circular"
        (yellowfin,) = left.plot(counts, circular, "x", color=WARNING, ms=7, mew=1.6, label=label)
        left.set(xlabel="workers n", ylabel="momentum μ", title="Implicit momentum of asynchronous descent")
        left.set(ylim=(-0.3, 1.05), yticks=[0, 0.25, 0.5, 0.75, 1])
        further = [_network(left, right, place, *item) for place, item in enumerate(networks.items())]
        left.legend(handles=[law, measured, *further, alone, yellowfin], fontsize=8, loc="lower right")
        right.axhspan(-2, 2, color="#e6eef5", lw=0)
        right.axhline(0, color=FAINT, lw=1.5)
        exact = [m.error < EXACT for m in found]
        offs = [0.0 if sure else (m.value - 1 + 1 / n) / m.error for n, m, sure in zip(counts, found, exact, strict=True)]
        right.errorbar(counts, offs, [0 if sure else 1 for sure in exact], fmt="o", color=ACCENT, ms=6, capsize=4)
        right.set(xlabel="workers n, and the standard error of μ", ylabel="(μ − (1 − 1/n)) / standard error", ylim=(-4, 4))
        right.set_title("Distance from the law, in standard errors")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(n) for n in counts])
            axes.minorticks_off()
            axes.set_xlim(counts[0] / 1.3, counts[-1] * 1.3)
        below = ["exact" if sure else f"{m.error:.0e}".replace("e-0", "e−") for m, sure in zip(found, exact, strict=True)]
        right.set_xticklabels([f"{n}\n{error}" for n, error in zip(counts, below, strict=True)])


def _network(left: Any, right: Any, place: int, name: str, found: Mapping[int, Momentum]) -> Any:
    """Draw the measurements of one model beside those of the quadratic; return its handle for the legend."""
    look: Any = {"fmt": "sD^v"[place % 4], "color": COLOURS[2 + place], "ms": 5, "capsize": 3, "zorder": 3}
    beside = [n * 1.09 ** (place + 1) for n in found]
    drawn = left.errorbar(
        beside, [m.value for m in found.values()], [2 * m.error for m in found.values()], label=f"{name} (± 2 s.e.)", **look
    )
    right.errorbar(beside, [(m.value - 1 + 1 / n) / m.error for n, m in found.items()], 1, **look)
    return drawn


def stability(path: Path, found: Mapping[int, float]) -> None:
    """Draw the largest stable ηh for n equal workers in turn: the formula, and the result of bisection on the recursion."""
    counts = sorted(found)
    first, last = counts[0], counts[-1]
    with _figure(path, width=6.5, columns=1) as (axes,):
        fine = [first + (last - first) * k / 200 for k in range(201)]
        curve = [2 * math.sin(math.pi / (4 * n - 2)) for n in fine]
        axes.fill_between(fine, curve, color="#e6eef5", lw=0)
        axes.plot(fine, curve, color=FAINT, lw=1.5, label="2 sin(π / (4n − 2))")
        axes.plot(counts, [found[n] for n in counts], "o", color=ACCENT, ms=5, label="found by bisection on the recursion")
        axes.text(0.1, 0.08, "converges", transform=axes.transAxes, color=ACCENT)
        axes.text(0.45, 0.5, "diverges", transform=axes.transAxes, color=WARNING)
        axes.set(xlabel="equal workers in turn, n", ylabel="learning rate × curvature, ηh")
        axes.set(xlim=(first - 0.3, last + 0.3), ylim=(0, None), xticks=counts, title="Edge of stability of DOWNPOUR(1)")
        axes.legend()


@contextmanager
def _figure(path: Path, *, width: float, columns: int) -> Iterator[Sequence[Any]]:
    """Yield axes, and write the figure at the end; without a screen, and without changing settings of the caller."""
    library = canvas.matplotlib()
    with library.rc_context(STYLE):
        figure = library.figure.Figure(figsize=(width, 4))
        yield figure.subplots(1, columns, squeeze=False)[0].tolist()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
        except OSError as error:
            raise UsageError(f"The figure {path} cannot be written ({error.strerror}); give another directory.") from error
