"""Curves of loss and metrics of one or several runs, from their records."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from paragrad.errors import UsageError, unknown
from paragrad.plotting import canvas
from paragrad.rundir import record
from paragrad.types import Event

Numbers: TypeAlias = npt.NDArray[np.float64]

AXES = ("epochs", "samples", "updates", "seconds")
"""Possible horizontal axes."""
COUNTERS = {"clock", "epoch", "samples", "seconds", "time"}
"""Keys of a validation that give its place in the run; every other number is a metric."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7b4fa3")
"""Colours that colour-blind readers can distinguish (Okabe and Ito); with more runs they repeat."""
STYLES = ("-", "--", ":", "-.")
"""Line styles of several runs, one per repetition of the colours."""
WIDTH, HEIGHT, LEGEND, DPI = 6.0, 2.2, 0.17, 120
"""Width of a figure, height of a panel and of a line of the legend, in inches; dots per inch."""
KINDS: dict[str, dict[str, Any]] = {
    "training, smoothed": {"linewidth": 0.9, "alpha": 0.6},
    "validation": {"linewidth": 1.4, "marker": "o", "markersize": 3.5},
    "NaN or infinite": {"linestyle": "none", "marker": "x", "markersize": 5},
}
"""Kinds of lines and their styles in a figure of several runs."""

DECADE = 10.0
"""Ratio of largest to smallest value above which an axis is logarithmic."""
BURST = 1000.0
"""Ratio of largest to median magnitude above which an axis with negative values is logarithmic."""
LEAST_SHARE = 0.2
"""Least span of an axis, relative to its largest value: with less, noise would look like a trend."""
LEAST_UNIT = 0.1
"""Least span for a metric between 0 and 1."""
HUGE = 1e100
"""Values beyond this are drawn as not finite."""


@dataclass(frozen=True)
class Line:
    """Values over one axis; values that are not finite are NaN."""

    x: Numbers
    y: Numbers

    @classmethod
    def of(cls, points: Iterable[tuple[float, float | None]]) -> Line:
        """Return a line through points, in the order in which they were recorded."""
        x, y = zip(*points, strict=True) if (points := list(points)) else ((), ())
        values = np.array([math.nan if value is None else value for value in y], dtype=np.float64)
        with np.errstate(invalid="ignore"):
            return cls(np.array(x, dtype=np.float64), np.where(np.abs(values) < HUGE, values, math.nan))

    @property
    def finite(self) -> Line:
        """The line without values that are not finite."""
        known = np.isfinite(self.y)
        return Line(self.x[known], self.y[known])

    @property
    def broken(self) -> Numbers:
        """Places of values that are not finite."""
        return self.x[np.isnan(self.y)]


@dataclass(frozen=True)
class Curves:
    """Curves of training and validation of a run, over one axis."""

    name: str
    training: Line
    validation: Mapping[str, Line]
    """``loss`` first, then the metrics by name."""
    virtual: bool
    """True if the seconds are those of a simulated cluster."""


def read(events: Sequence[Event], *, name: str, x: str) -> Curves:
    """Return the curves of a run, without what came after a checkpoint that it was resumed from."""
    if x not in AXES:
        raise unknown("axis", x, AXES)
    start = next((event.data for event in events if event.kind == "start"), {})
    if x == "epochs" and not start.get("rows"):
        raise UsageError(f"The record of {name} does not say how many rows an epoch has: draw it with --x samples.")
    commits = record.effective(events)
    looks = record.validations(events)
    clocks = [commit.data["clock"] for commit in commits]
    samples = [0, *accumulate(commit.data["rows"] for commit in commits)]

    def place(event: Event, rows: float) -> float:
        if x == "seconds":
            return event.time
        if x == "updates":
            return float(event.data["clock"])
        return rows / start["rows"] if x == "epochs" else rows

    def rows_at(look: Event) -> float:
        return float(look.data.get("samples", samples[bisect_right(clocks, look.data["clock"])]))

    names = {name: None for look in looks for name, value in look.data.items() if _is_measured(name, value)}
    return Curves(
        name=name,
        training=Line.of((place(c, rows), c.data["loss"]) for c, rows in zip(commits, samples[1:], strict=True)),
        validation={
            name: Line.of((place(look, rows_at(look)), look.data[name]) for look in looks if name in look.data)
            for name in sorted(names, key=lambda name: (name != "loss", name != "accuracy"))
        },
        virtual=record.is_virtual(start),
    )


def _is_measured(name: str, value: Any) -> bool:
    return name not in COUNTERS and (value is None or isinstance(value, int | float))


def draw(runs: Sequence[Curves], *, title: str, x: str) -> Any:
    """Return a figure: smoothed training loss and validation loss, and one panel per metric below."""
    names = list({"loss": None} | {name: None for run in runs for name in run.validation})
    legend = _runs_legend(runs) if len(runs) > 1 else {}
    height = max(2, len(names)) * HEIGHT + len(legend) * LEGEND
    figure = canvas.matplotlib().figure.Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        _panel(axes, name, runs)
    virtual = {run.virtual for run in runs}
    seconds = "seconds (virtual where simulated)" if len(virtual) > 1 else "virtual seconds" if True in virtual else "seconds"
    panels[-1].set_xlabel(seconds if x == "seconds" else "updates of the center" if x == "updates" else x)
    panels[0].set_title(title, fontsize=10)
    if legend:
        place: Any = {"loc": "outside lower center", "fontsize": 8, "frameon": False, "handlelength": 2.4}
        figure.legend(legend.values(), legend.keys(), **place)
    return figure


def _panel(axes: Any, name: str, runs: Sequence[Curves]) -> None:
    """Draw one quantity of all runs; for a single run also the single commits."""
    shown: list[float] = []
    alone = len(runs) == 1
    for number, run in enumerate(runs):
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
        broken: list[float] = []
        if name == "loss" and len(run.training.x):
            known = run.training.finite
            smooth = smoothed(known.y)
            if alone:
                axes.plot(known.x, known.y, color=colour, linewidth=0.5, alpha=0.25)
            look = {"linewidth": 1.6} if alone else KINDS["training, smoothed"]
            point = {"marker": "o", "markersize": 3.5} if len(smooth) == 1 else {}  # a single point has no line
            axes.plot(known.x, smooth, color=colour, linestyle=style, label="training, smoothed", **point, **look)
            shown += smooth.tolist()
            broken += run.training.broken.tolist()
        if name in run.validation:
            line, second = run.validation[name], COLOURS[1] if alone else colour
            axes.plot(line.x, line.y, color=second, linestyle=style, label="validation", **KINDS["validation"])
            shown += line.finite.y.tolist()
            broken += line.broken.tolist()
        if broken:
            look = {"transform": axes.get_xaxis_transform(), "color": "#b00020" if alone else colour}
            axes.plot(broken, [0.97] * len(broken), label="NaN or infinite", **KINDS["NaN or infinite"], **look)
    _scale(axes, shown, unit=name != "loss")
    axes.margins(x=0.02)
    axes.set_xlim(left=-0.02 * axes.get_xlim()[1])
    axes.set_ylabel(name)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if alone and name == "loss":
        axes.legend(fontsize=8, frameon=False)


def _runs_legend(runs: Sequence[Curves]) -> dict[str, Any]:
    """Return handles by name: the kinds of lines, then each run with its last metrics."""
    line_of = canvas.matplotlib().lines.Line2D
    broken = any(len(line.broken) for run in runs for line in (run.training, *run.validation.values()))
    kinds = {name: look for name, look in KINDS.items() if broken or name != "NaN or infinite"}
    legend = {name: line_of([], [], color="#333333", **look) for name, look in kinds.items()}
    for number, run in enumerate(runs):
        style = STYLES[number // len(COLOURS) % len(STYLES)]
        last = [f"{name} {line.y[-1]:.4g}" for name, line in run.validation.items() if len(line.y)]
        name = run.name + f": {', '.join(last)}" * bool(last)
        legend[name] = line_of([], [], color=COLOURS[number % len(COLOURS)], linestyle=style, linewidth=1.6)
    return legend


def _scale(axes: Any, values: Sequence[float], *, unit: bool) -> None:
    if not values:
        return
    low, high, scale = limits(values, unit=unit)
    bend = {"linthresh": float(np.median(np.abs(values)))} if scale == "symlog" else {}
    axes.set_yscale(scale, **bend)
    axes.set_ylim(low, high)
    ticker = canvas.matplotlib().ticker
    if scale == "log":
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high / low < DECADE**3 else (1,)))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    elif scale == "symlog":
        locator = ticker.SymmetricalLogLocator(base=DECADE, **bend)
        locator.set_params(numticks=6)
        axes.yaxis.set_major_locator(locator)
    if scale != "linear":
        axes.yaxis.set_major_formatter("{x:g}")


def limits(values: Sequence[float], *, unit: bool = False) -> tuple[float, float, Literal["linear", "log", "symlog"]]:
    """Return lower end, upper end and scale of an axis for these values.

    The axis is logarithmic if no value is negative and the positive ones span more than a decade; zeros are then outside. With
    negative values, it is logarithmic in both directions if a few large values (``BURST``) would flatten the rest. A linear
    axis spans at least ``LEAST_SHARE`` of the largest value. With ``unit``, values between 0 and 1 (an accuracy) get a linear
    axis within 0 and 1 that spans at least ``LEAST_UNIT``.
    """
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    unit = unit and low >= 0 and high <= 1
    positive = max(min((value for value in values if value > 0), default=math.inf), high / HUGE)
    if not unit and low >= 0 and high > DECADE * positive:
        margin = (high / positive) ** 0.06
        return positive / margin, high * margin, "log"
    if low < 0 and largest > BURST * float(np.median(np.abs(values))) > 0:
        return low - 0.5 * abs(low), high + 0.5 * abs(high), "symlog"
    least = LEAST_UNIT if unit else LEAST_SHARE * largest or LEAST_UNIT
    missing = max(0.0, least - (high - low)) / 2
    low, high = low - missing, high + missing
    if unit:  # shift the axis into 0 to 1 instead of cutting it
        low, high = max(0.0, low - max(0.0, high - 1)), min(1.0, high + max(0.0, -low))
    margin = 0.05 * (high - low)
    return low - margin, high + margin, "linear"


def smoothed(values: Numbers) -> Numbers:
    """Return the running mean over the last fiftieth of all values, at least 1.

    Each window is the end of one block and the start of the next, summed separately: differences of a single running sum would
    lose all digits after a very large value.
    """
    width = max(1, len(values) // 50)
    blocks = np.zeros((len(values) // width + 2, width))
    blocks.flat[width : width + len(values)] = values
    begins = blocks.cumsum(1)
    ends = np.zeros_like(blocks)
    ends[:, :-1] = blocks[:, :0:-1].cumsum(1)[:, ::-1]
    sums = (begins[1:] + ends[:-1]).ravel()[: len(values)]
    return np.asarray(sums / np.minimum(np.arange(1, len(values) + 1), width), dtype=np.float64)
