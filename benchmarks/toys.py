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
The two commands repeat the run. Its workers are those of a virtual cluster, whose local steps take the seconds that
`--cluster` gives ([the vector engine](../vector.md)); `benchmarks/toys.py` draws the picture. A thin line is one window, from
where it began to where it ended; where gradients are sent, from where one was taken to the center that it made.
Problem, rate and length were chosen for each scheme so that its character is seen; each is one run with seed 0, no ranking."""
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
    """What is to be seen, in a sentence."""
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
        "One step on the mean of four gradients, all taken at the center: the workers' lines lie on its path, the noise is "
        "halved, and nothing overshoots.",
    ),
    "BackupWorkers": Case(
        "backupworkers",
        BOWL,
        "sgd:lr=0.04",
        300,
        "SyncSGD's path again, but each step is the mean of the first three gradients to come: that of the slow worker is "
        "dropped, and not waited for.",
        cluster=LATE,
    ),
    "SoftSync": Case(
        "softsync",
        BOWL,
        "sgd:lr=0.04",
        300,
        "A line leads from where a gradient was taken to the center that it helped to make: most lie on the path, those of the "
        "slow worker cut across its bend, and count less for it.",
        cluster=LATE,
    ),
    "ModelAveraging": Case(
        "modelaveraging",
        VALLEY,
        "sgd:lr=0.02",
        800,
        "Four workers leave the center together, noise drives them apart for ten steps, and the center jumps to their mean.",
    ),
    "EASGD": Case(
        "easgd",
        VALLEY,
        "sgd:lr=0.02",
        800,
        "Like model averaging, but nobody is reset: each worker goes on from near where it was, and the center moves most of "
        "the way to their mean.",
    ),
    "DiLoCo": Case(
        "diloco:window=10",
        VALLEY,
        "sgd:lr=0.01",
        2400,
        "The outer momentum carries the center faster than its workers move: past the minimum along the flat valley, and back.",
    ),
    "Hogwild": Case(
        "hogwild",
        BOWL,
        "sgd:lr=0.04",
        150,
        "Workers that write into the center without a lock have no order that could be simulated. Drawn is what is left "
        "without their races, `downpour:window=1`, as the run's note says: each step was computed about three updates ago.",
    ),
    "Downpour": Case(
        "downpour",
        BOWL,
        "sgd:lr=0.04",
        150,
        "At a rate at which SyncSGD walks straight the center swings: each movement was computed about three updates ago (its "
        "line begins on the path, further back), and is added whole.",
    ),
    "DeanDownpour": Case(
        "deandownpour:window=5,fetch=5,rate=0.5",
        BOWL,
        "sgd:lr=0.02",
        300,
        "Adagrad at the center gives both parameters the same speed: the path starts along the diagonal, where the workers "
        "themselves run down the steep side, and its steps shrink.",
    ),
    "DynSGD": Case(
        "dynsgd",
        BOWL,
        "sgd:lr=0.04",
        300,
        "The first windows, all made at the start, still overshoot, though the second counts a half and the third a third; "
        "then the swing dies out, where Downpour with this window and rate diverges.",
        cluster=LATE,
    ),
    "StalenessAware": Case(
        "stalenessaware",
        BOWL,
        "sgd:lr=0.04",
        300,
        "A line leads from where a gradient was taken to the center after it: the slow worker's cut far across. Each step is "
        "divided by its staleness, and after one swing the center walks straight.",
        cluster=LATE,
    ),
    "AGN": Case(
        "agn:window=10",
        VALLEY,
        "sgd:lr=0.02",
        1600,
        "Each worker runs ahead for ten steps, and the center follows by a tenth of that: it moves in the mean direction of "
        "many windows, smoothly.",
    ),
    "ADAG": Case(
        "adag:window=10,gamma=0.01",
        VALLEY,
        "sgd:lr=0.02",
        1600,
        "AGN's path with shorter steps where the center moves far while a window is made, which is early on.",
    ),
    "AEASGD": Case(
        "aeasgd",
        VALLEY,
        "sgd:lr=0.02",
        1200,
        "The workers explore around the center on a leash and arrive first; it comes after them, by a tenth of the distance at "
        "every exchange.",
    ),
    "EAMSGD": Case(
        "eamsgd",
        VALLEY,
        "sgd:lr=0.005",
        2000,
        "As AEASGD at a quarter of the rate: with momentum the workers shoot past the minimum along the valley, draw the "
        "center after them, and both come back.",
    ),
    "GEM": Case(
        "gem",
        BOWL,
        "sgd:lr=0.02",
        150,
        "Commits are stretched and shrunk, element by element, so that all together move the center as far as one worker with "
        "momentum would: in straight pieces, and often along one axis only.",
    ),
    "DCASGD": Case(
        "dcasgd",
        BOWL,
        "sgd:lr=0.04",
        150,
        "The same rate and staleness as in Downpour's picture, but each gradient is corrected for how far the center has moved "
        "since: the swing is little more than a quarter of that.",
    ),
    "OrMo": Case(
        "ormo",
        BOWL,
        "sgd:lr=0.004",
        300,
        "Momentum swings past the minimum and settles, although a gradient is three updates old on average; one worker alone "
        "swings a little more than half as far.",
    ),
    "AsyncDiLoCo": Case(
        "asyncdiloco:window=10",
        VALLEY,
        "sgd:lr=0.01",
        2400,
        "Every commit moves the center a little, every fourth renews its momentum: a smooth path, from which the workers' "
        "windows lead back into the valley.",
    ),
}
"""A run for each scheme, in which its character is seen."""

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
        "## Seen",
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
