"""Every scheme seen at work: four workers on a toy problem, drawn for docs/schemes.

    .venv/bin/python benchmarks/toys.py [--only NAME ...]

An exact simulation, the same at every run: workers in turn, so that each commit of equal workers is n - 1 updates stale.
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
from paragrad import options, plot, record, schemes, toys
from paragrad.center import Center
from paragrad.engines.serial import Serial
from paragrad.job import Job
from paragrad.learners.learner import Learner
from paragrad.session import Session

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
WORKERS = 4
ENGINE = f"--workers {WORKERS}"
"""The engine's part of the command that repeats a run."""
HOW = """\
A run of this kind, with real processes. In the picture the workers take turns, so that it is the same each time
(`benchmarks/toys.py`); where one is slow, it commits once for three times of each other. A thin line is one window, from
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
    slow: float = 1.0
    """How many times as long the last worker takes for a window."""

    @property
    def shards(self) -> Literal["dealt", "stolen"]:
        """Equal workers that wait for each other are dealt their rows; else whoever is ready takes the next."""
        waits = options.parse(self.scheme, "scheme", schemes).quorum(WORKERS) > 1
        return "dealt" if waits and self.slow == 1 else "stolen"


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
        slow=3.0,
    ),
    "SoftSync": Case(
        "softsync",
        BOWL,
        "sgd:lr=0.04",
        300,
        "A line leads from where a gradient was taken to the center that it helped to make: most lie on the path, those of the "
        "slow worker cut across, and count less for it.",
        slow=3.0,
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
        "The workers' steps are the center's own. In this simulation they take turns, so that it is plain SGD; where they "
        "write at once, steps are taken at weights that are half old.",
    ),
    "Downpour": Case(
        "downpour",
        BOWL,
        "sgd:lr=0.04",
        150,
        "At a rate at which SyncSGD walks straight the center swings: each movement was computed three updates ago (its line "
        "begins on the path, further back), and is added whole.",
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
        slow=3.0,
    ),
    "StalenessAware": Case(
        "stalenessaware",
        BOWL,
        "sgd:lr=0.04",
        300,
        "A line leads from where a gradient was taken to the center after it: all are stale, each step is divided by how much, "
        "and after one swing the center walks straight.",
        slow=3.0,
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
        "As AEASGD at a quarter of the rate: with momentum the workers shoot past the minimum along the valley, and the center "
        "is drawn after them.",
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
        "since: the swing is about a quarter of that.",
    ),
    "OrMo": Case(
        "ormo",
        BOWL,
        "sgd:lr=0.004",
        300,
        "Momentum swings past the minimum and settles, although every gradient is three updates old; one worker alone swings "
        "a little more than half as far.",
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


@dataclass(frozen=True)
class Turns:
    """An engine in this process: whoever has waited longest goes on, the last worker later than the others."""

    workers: int = WORKERS
    slow: float = 1.0
    name = "in turn"
    threads_each = 1

    def prepare(self) -> None:
        """Nothing takes time."""

    def check(self, job: Job, learner: Learner) -> None:
        """It can do what the worker's loop can."""

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        """Train; the record is written as on any engine."""
        ends = [1.0] * (self.workers - 1) + [self.slow]

        def first_to_end(ready: list[int]) -> int:
            rank = min(ready, key=lambda k: ends[k])
            now = ends[rank]
            ends[rank] = now + (self.slow if rank == self.workers - 1 else 1.0)
            return rank

        serial = Serial(job, self.workers, choose=first_to_end, stolen=session.run.shards == "stolen")
        session.attach(serial.center)
        session.go()
        serial.run()
        session.end()
        return serial.center


def train(case: Case, out: Path) -> Path:
    """Run a case, and return its run directory. The engine is chosen here, and nowhere else."""
    scheme = options.parse(case.scheme, "scheme", schemes)
    run = pg.Run(out=str(out), checkpoint_every=None, validate_every=None, shards=case.shards)
    with contextlib.suppress(pg.Diverged):  # a picture of that is a picture, too
        pg.train(
            toys.build(case.model),
            f"noise:rows={case.rows}",
            optimizer=case.optimizer,
            scheme=scheme,
            engine=Turns(slow=case.slow),
            batch_size=1,
            run=run,
        )
    return out


def command(case: Case) -> str:
    """What repeats a run on the command line."""
    shards = "--shards stolen " if case.slow != 1 else ""
    return (
        f"paragrad train --model {quoted(case.model)} --data noise:rows={case.rows} --scheme {case.scheme} "
        f"--optimizer {case.optimizer} {ENGINE} {shards}--out runs/toy"
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
    late = f", one {case.slow:g} times slower" if case.slow != 1 else ""
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
