"""Every scheme seen at work: four workers on a toy problem, drawn for docs/schemes.

    .venv/bin/python benchmarks/toys.py [--only NAME ...]

An exact simulation on a virtual cluster (the vector engine), the same at every run: the workers differ a little in speed, so
that they do not take turns but meet the center in changing order.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import paragrad as pg
from paragrad import cluster, schemes
from paragrad.config import options
from paragrad.models import toys
from paragrad.plotting import plot
from paragrad.rundir import record

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
WORKERS = 4
ALIKE = "homogeneous:speeds=(1.0,1.1,1.2,1.3)"
"""A cluster of workers that differ a little in speed."""
LATE = "homogeneous:speeds=(1.0,1.1,1.2,3.3)"
"""The same, but the last takes three times as long as the others on average."""
HOW = """\
The two commands repeat the run on a virtual cluster ([the vector engine](../vector.md)): `--cluster` gives the seconds of a
local step of each worker. `benchmarks/toys.py` draws the picture. A thin line is one window, from its first point to its last.
For schemes that send gradients, it leads from the point where a gradient was taken to the center after its update. The
problem, learning rate and length were chosen to show the character of each scheme. Each picture is one run with seed 0, not a
ranking."""
BYTES = 60_000
"""A picture is smaller than this, or it is not written."""


@dataclass(frozen=True)
class Case:
    """One run that is drawn."""

    scheme: str
    model: str
    optimizer: str
    rows: int
    caption: str
    """What the picture shows."""
    cluster: str = ALIKE
    """The virtual cluster."""

    @property
    def partition(self) -> Literal["auto", "stolen"]:
        """Workers that wait for each other are dealt their rows, but where one is slow: else all would wait for it."""
        return "stolen" if self.cluster == LATE else "auto"


VALLEY = "beale:noise=2"
BOWL = "quadratic:curvatures=(1,10),start=(4,2),noise=1"

CASES: dict[str, Case] = {
    "SyncSGD": Case(
        "syncsgd",
        BOWL,
        "sgd:lr=0.04",
        300,
        "Each step uses the mean of four gradients, all taken at the center. The workers' lines are on its path, the noise "
        "is halved, and nothing overshoots.",
    ),
    "BackupWorkers": Case(
        "backupworkers",
        BOWL,
        "sgd:lr=0.04",
        300,
        "The path of SyncSGD, but each step is the mean of the first three gradients to arrive. The center drops the "
        "gradient of the slow worker and does not wait for it.",
        cluster=LATE,
    ),
    "SoftSync": Case(
        "softsync",
        BOWL,
        "sgd:lr=0.04",
        300,
        "A line leads from the point where a gradient was taken to the center that it contributed to. Most lines are on the "
        "path. Those of the slow worker cut across its bend, and have less weight.",
        cluster=LATE,
    ),
    "ModelAveraging": Case(
        "modelaveraging",
        VALLEY,
        "sgd:lr=0.02",
        800,
        "Four workers leave the center together. Noise drives them apart for ten steps, and the center jumps to their mean.",
    ),
    "EASGD": Case(
        "easgd",
        VALLEY,
        "sgd:lr=0.02",
        800,
        "Like model averaging, but no worker is reset: each continues from near its own position, and the center moves most "
        "of the way to their mean.",
    ),
    "DiLoCo": Case(
        "diloco:window=10",
        VALLEY,
        "sgd:lr=0.01",
        2400,
        "The outer momentum moves the center faster than its workers: past the minimum along the flat valley, and back.",
    ),
    "Hogwild": Case(
        "hogwild",
        BOWL,
        "sgd:lr=0.04",
        150,
        "Workers that write into the center without a lock have no order that could be simulated. The picture shows the "
        "scheme without its races, `downpour:window=1`, as the note of the run says. Each step was computed about three "
        "updates ago.",
    ),
    "Downpour": Case(
        "downpour",
        BOWL,
        "sgd:lr=0.04",
        150,
        "At a learning rate at which SyncSGD goes straight, the center oscillates. Each movement was computed about three "
        "updates ago (its line begins further back on the path), and is added in full.",
    ),
    "DeanDownpour": Case(
        "deandownpour:window=5,fetch=5,rate=0.5",
        BOWL,
        "sgd:lr=0.02",
        300,
        "Adagrad at the center gives both parameters the same speed. The path starts along the diagonal, while the workers "
        "run down the steep side. Its steps shrink.",
    ),
    "DynSGD": Case(
        "dynsgd",
        BOWL,
        "sgd:lr=0.04",
        300,
        "The first windows, all computed at the start, still overshoot, although the second has weight 1/2 and the third "
        "1/3. The oscillation then dies out. Downpour diverges with this window and learning rate.",
        cluster=LATE,
    ),
    "StalenessAware": Case(
        "stalenessaware",
        BOWL,
        "sgd:lr=0.04",
        300,
        "A line leads from the point where a gradient was taken to the center after it. Those of the slow worker cut far "
        "across. Each step is divided by its staleness, and after one oscillation the center goes straight.",
        cluster=LATE,
    ),
    "AGN": Case(
        "agn:window=10",
        VALLEY,
        "sgd:lr=0.02",
        1600,
        "Each worker runs ahead for ten steps, and the center follows by a tenth of that. It moves smoothly, in the mean "
        "direction of many windows.",
    ),
    "ADAG": Case(
        "adag:window=10,gamma=0.01",
        VALLEY,
        "sgd:lr=0.02",
        1600,
        "The path of AGN, with shorter steps where the center moves far during a window, which happens early on.",
    ),
    "AEASGD": Case(
        "aeasgd",
        VALLEY,
        "sgd:lr=0.02",
        1200,
        "The workers explore around the center, tied to it by the elastic force, and reach the minimum first. The center "
        "follows by a tenth of the distance at every exchange.",
    ),
    "EAMSGD": Case(
        "eamsgd",
        VALLEY,
        "sgd:lr=0.005",
        2000,
        "Like AEASGD, at a quarter of the learning rate. With momentum the workers overshoot the minimum along the valley "
        "and pull the center after them; both come back.",
    ),
    "GEM": Case(
        "gem",
        BOWL,
        "sgd:lr=0.02",
        150,
        "GEM scales commits element by element, so that all workers together move the center as far as one worker with "
        "momentum. The path has straight pieces, often along one axis only.",
    ),
    "DCASGD": Case(
        "dcasgd",
        BOWL,
        "sgd:lr=0.04",
        150,
        "Learning rate and staleness are those of Downpour's picture, but each gradient is corrected for the movement of "
        "the center since. The oscillation is little more than a quarter as large.",
    ),
    "OrMo": Case(
        "ormo",
        BOWL,
        "sgd:lr=0.004",
        300,
        "Momentum overshoots the minimum and settles, although a gradient is three updates old on average. One worker alone "
        "overshoots a little more than half as far.",
    ),
    "AsyncDiLoCo": Case(
        "asyncdiloco:window=10",
        VALLEY,
        "sgd:lr=0.01",
        2400,
        "Every commit moves the center a little, and every fourth commit renews its momentum. The path is smooth, and the "
        "workers' windows lead from it back into the valley.",
    ),
}
"""One run per scheme that shows its character."""

COMPARED = (
    Case("downpour:window=5", BOWL, "sgd:lr=0.04", 600, ""),
    Case("agn:window=5", BOWL, "sgd:lr=0.04", 600, ""),
)
"""The same problem, rate, window and rows; only what the center does with a window differs."""


def train(case: Case, out: Path) -> Path:
    """Run a case, and return its run directory."""
    with contextlib.suppress(pg.Diverged):  # a picture of that is a picture, too
        pg.train(
            toys.build(case.model),
            f"noise:rows={case.rows}",
            optimizer=case.optimizer,
            scheme=options.parse(case.scheme, "scheme", schemes),
            engine=pg.Vector(workers=WORKERS, cluster=cluster.from_text(case.cluster)),
            batch_size=1,
            run=pg.Run(out=str(out), partition=case.partition),
            verbose=0,
        )
    return out


def command(case: Case) -> str:
    """What repeats a run on the command line."""
    partition = "--partition stolen " if case.partition == "stolen" else ""
    return (
        f"paragrad train --model {quoted(case.model)} --data noise:rows={case.rows} --scheme {case.scheme} "
        f"--optimizer {case.optimizer} --engine vector --workers {WORKERS} --cluster {quoted(case.cluster)} "
        f"{partition}--out runs/toy"
    )


def seen(name: str) -> list[str]:
    """The lines of a scheme's page that show it."""
    case = CASES[name]
    return [
        "## On a toy problem",
        "",
        f"![The path of {name} on a toy problem](../figures/schemes/{name.lower()}.png)",
        "",
        case.caption,
        "",
        "```console",
        f"$ {command(case)}",
        "$ paragrad plot runs/toy",
        "```",
        "",
        HOW,
    ]


def quoted(text: str) -> str:
    """For a shell."""
    return f"'{text}'" if "(" in text else text


def small(figure: Any) -> bytes:
    """A figure as a PNG with a palette of what it is drawn with: a quarter of the bytes, and no difference to the eye."""
    from PIL import Image

    buffer, reduced = io.BytesIO(), io.BytesIO()
    figure.savefig(buffer, format="png")
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for colour in colours() for value in colour])
    drawn = Image.open(buffer).convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)
    drawn.save(reduced, format="png", optimize=True)
    return reduced.getvalue()


def colours() -> list[tuple[int, int, int]]:
    """Greys, and each worker's colour (and the star's) more or less strong over three greys."""
    found = [(grey, grey, grey) for grey in range(0, 250, 4)] + [(255, 255, 255)]
    for code in (*plot.COLOURS[:WORKERS], plot.MINIMUM):
        pure = [int(code[place : place + 2], 16) for place in (1, 3, 5)]
        for strength in (0.12, 0.25, 0.38, 0.5, 0.62, 0.75, 0.88, 1.0):
            for grey in (0, 165, 205, 255):
                red, green, blue = (round(strength * value + (1 - strength) * grey) for value in pure)
                found.append((red, green, blue))
    return found


def run(case: Case) -> plot.Trace:
    """Run a case, and return where it went."""
    with tempfile.TemporaryDirectory() as folder:
        directory = train(case, Path(folder) / "run")
        return plot.trace_of(list(record.read(directory / "record.jsonl")), toys.build(case.model))


def draw(case: Case) -> bytes:
    """Run a case and draw it."""
    late = ", one three times slower" if case.cluster == LATE else ""
    title = f"{case.scheme}, {WORKERS} workers{late}; {case.optimizer}"
    return small(plot.path(toys.build(case.model), run(case), title=title))


def compare(cases: Sequence[Case], box: plot.Box) -> bytes:
    """Runs on one problem side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 3.6), dpi=plot.DPI, layout="constrained")
    row = figure.subplots(1, len(cases), sharey=True)
    for axes, case in zip(row, cases, strict=True):
        plot.over(axes, toys.build(case.model), run(case), box)
        axes.set_title(case.scheme, fontsize=10)
        axes.label_outer()
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False, handlelength=1.4)
    return small(figure)


def write(path: Path, picture: bytes) -> None:
    """Keep a picture, if it is small enough to be kept in a repository."""
    if len(picture) > BYTES:
        sys.exit(f"{path.name} would have {len(picture):,} bytes, more than {BYTES:,}: draw less.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)
    print(f"{path.name}  {len(picture):,} bytes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*CASES, "compared"], help="schemes to draw, or compared")
    parser.add_argument("--out", type=Path, default=FIGURES)
    given = parser.parse_args()
    for name in given.only:
        if name == "compared":
            write(given.out / "downpour-agn.png", compare(COMPARED, ((-1.0, -4.0), (5.0, 4.0))))
        else:
            write(given.out / "schemes" / f"{name.lower()}.png", draw(CASES[name]))


if __name__ == "__main__":
    main()
