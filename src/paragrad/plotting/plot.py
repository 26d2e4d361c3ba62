"""Figures of runs from their records: the path of a toy problem over its contours, or curves of loss and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from paragrad.config import options
from paragrad.errors import UsageError
from paragrad.models import toys
from paragrad.plotting import canvas, curves
from paragrad.plotting.curves import COLOURS, DPI
from paragrad.rundir import record
from paragrad.types import Event

Point: TypeAlias = tuple[float, float]
Box: TypeAlias = tuple[Point, Point]

MINIMUM = "#f0e442"
LEVELS = 13
"""Number of contour lines."""
GRID = 160
"""Points along each side at which the function is evaluated."""
SIZE = (6.0, 4.4)
KINDS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Window:
    """Movement of one worker between two exchanges, in the first two parameters."""

    worker: int
    began: Point
    ended: Point


@dataclass
class Trace:
    """Path of a small model: the windows of its workers, and the center after each update."""

    windows: list[Window] = field(default_factory=list)
    on_center: bool = False
    """True if workers write into the center itself: their lines are then drawn above it."""
    centers: list[Point] = field(default_factory=list)


def plot(runs: Sequence[str | Path], out: str | Path | None = None, *, x: str | None = None) -> Path:
    """Draw one or several runs; return the file, by default ``plot.png`` in the run directory, or here for several runs.

    One run of a toy problem with at least two parameters becomes a path over the contours of its function, in the first two
    parameters. Other runs, several runs, and runs with ``x`` (one of ``curves.AXES``) become curves of loss and metrics, by
    default over epochs.
    """
    directories = [Path(run) for run in runs]
    records = {directory: list(record.read(directory)) for directory in directories}
    target = Path(out) if out is not None else (directories[0] if len(records) == 1 else Path()) / "plot.png"
    if target.suffix.lower() not in KINDS:
        raise UsageError(f"out={str(target)!r}, but the format must be one of {', '.join(KINDS)}.")
    toy = None
    if len(records) == 1 and x is None and (directories[0] / "run.toml").exists():
        model = options.read_config(directories[0] / "run.toml").get("model", "")
        toy = toys.build(model) if toys.is_toy(model) else None
    trace = trace_of(records[directories[0]], toy)
    if toy is not None and trace.centers:
        figure = path(toy, trace, title=title(records[directories[0]]))
    else:
        figure = _curves(records, x or curves.AXES[0])
    try:
        figure.savefig(target)
    except OSError as error:
        raise UsageError(f"{str(target)!r} cannot be written ({error.strerror}): give another file with --out.") from error
    return target


def _curves(records: Mapping[Path, Sequence[Event]], x: str) -> Any:
    """Return a figure of one run, named by its title, or of several, named by directories and titles."""
    found = []
    for directory, events in records.items():
        name = title(events) if len(records) == 1 else f"{directory}, {title(events)}"
        found.append(curves.read(events, name=name, x=x))
        if not len(found[-1].training.x) and not found[-1].validation:
            raise UsageError(
                f"The record of {str(directory)!r} has neither a commit nor a validation yet: there is nothing to draw. "
                "Let the run continue."
            )
    return curves.draw(found, title=found[0].name if len(found) == 1 else "", x=x)


def title(events: Iterable[Event]) -> str:
    """Return the scheme, the number of workers and the engine of a run."""
    start: Mapping[str, Any] = next((event.data for event in events if event.kind == "start"), {})
    engine, fields = options.split_fields(start.get("engine", ""))
    fields.pop("workers", None)
    more = ", " + ", ".join(f"{key}={value}" for key, value in fields.items()) if fields else ""
    count = start.get("workers", 0)
    return f"{start.get('scheme', '')}, {count} worker{'s' * (count != 1)} ({engine}{more})"


def trace_of(events: Iterable[Event], toy: toys.Toy | None) -> Trace:
    """Return the path in a record, without what came after a checkpoint that the run was resumed from; empty without one."""
    trace = Trace()
    if toy is None or toy.size < 2:
        return trace
    last = _point(toy.start)
    trace.centers.append(last)
    for commit in record.effective(events):
        if "center" not in commit.data:
            return Trace()
        center = _point(commit.data["center"])
        trace.on_center = "path" not in commit.data
        # If workers write into the center itself, its step is that of the worker.
        began, ended = map(_point, commit.data.get("path", (last, center)))
        # A worker that sends gradients does not move: its line leads to the center after its gradient was applied.
        trace.windows.append(Window(commit.data["worker"], began, center if began == ended else ended))
        if center != last:
            trace.centers.append(center)
        last = center
    return trace


def path(toy: toys.Toy, trace: Trace, *, title: str) -> Any:
    """Return a figure of one path, drawn by ``over``."""
    figure = canvas.matplotlib().figure.Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    over(axes, toy, trace)
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside right center", fontsize=8, frameon=False, handlelength=1.4)
    return figure


def over(axes: Any, toy: toys.Toy, trace: Trace, box: Box | None = None) -> None:
    """Draw contours of the function, a thin line per window in the colour of its worker, and the path of the center in black.

    ``box`` is (lower left, upper right); by default it contains the path, but only part of a diverging one.
    """
    collection_of = canvas.matplotlib().collections.LineCollection
    low, high = box or _box(toy, trace)
    _contours(axes, toy, low, high)
    for worker in sorted({window.worker for window in trace.windows}):
        lines = [(window.began, window.ended) for window in trace.windows if window.worker == worker]
        colour = COLOURS[worker % len(COLOURS)]
        order = 4.5 if trace.on_center else 2.0
        axes.add_collection(collection_of(lines, colors=colour, linewidths=1.2, alpha=0.8, zorder=order))
        axes.plot([], [], color=colour, linewidth=1.5, label=f"worker {worker}")
    x, y = zip(*trace.centers, strict=True)
    axes.plot(x, y, color="white", linewidth=3.6, alpha=0.8, zorder=3, solid_joinstyle="round")
    axes.plot(x, y, color="black", linewidth=1.8, zorder=4, solid_joinstyle="round", label="center")
    marks = {
        "start": (trace.centers[0], {"marker": "o", "markersize": 7, "markerfacecolor": "white", "zorder": 6}),
        "end": (trace.centers[-1], {"marker": "s", "markersize": 7, "markerfacecolor": "black", "zorder": 6}),
        "minimum": (toy.minimum[:2], {"marker": "*", "markersize": 14, "markerfacecolor": MINIMUM, "zorder": 7}),
    }
    for name, (where, style) in marks.items():
        axes.plot(*where, linestyle="none", markeredgecolor="black", label=name, **style)
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), xlabel="first parameter", ylabel="second parameter")
    axes.tick_params(labelsize=8)


def _contours(axes: Any, toy: toys.Toy, low: Point, high: Point) -> None:
    x, y = (np.linspace(low[axis], high[axis], GRID) for axis in (0, 1))
    grid = np.zeros((GRID, GRID, toy.size))
    grid[:] = toy.minimum  # further parameters have their values at the minimum
    grid[..., 0], grid[..., 1] = np.meshgrid(x, y)
    heights = toy.value(torch.from_numpy(grid)).numpy()
    top = float(heights.max())
    # Down to a thousandth of the start: lower contours would hide the minimum.
    bottom = min(max(float(toy.value(torch.tensor(toy.start))), top * 1e-4), top) * 1e-3
    levels = np.geomspace(bottom, top, LEVELS)
    greys = [str(grey) for grey in np.linspace(1.0, 0.8, LEVELS - 1)]
    axes.contourf(x, y, np.clip(heights, bottom, top), levels=levels, colors=greys, zorder=0)
    axes.contour(x, y, heights, levels=levels, colors="#b0b0b0", linewidths=0.5, zorder=1)


def _box(toy: toys.Toy, trace: Trace) -> Box:
    """Return a box with start, minimum and path, except points that are very far away."""
    ends = np.array([trace.centers[0], toy.minimum[:2]])
    points = np.array([*ends, *trace.centers, *(p for w in trace.windows for p in (w.began, w.ended))])
    points = points[np.isfinite(points).all(1)]
    near = float(np.abs(ends[1] - ends[0]).max()) or 1.0
    low = np.maximum(points.min(0), ends.min(0) - 1.2 * near)
    high = np.minimum(points.max(0), ends.max(0) + 1.2 * near)
    # A path along one axis needs some space on both sides.
    pad = np.maximum(0.08 * (high - low), 0.35 * near - (high - low) / 2)
    low, high = low - np.maximum(pad, 0.06 * near), high + np.maximum(pad, 0.06 * near)
    return _point(low.tolist()), _point(high.tolist())


def _point(values: Sequence[float]) -> Point:
    return float(values[0]), float(values[1])
