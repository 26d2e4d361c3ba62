"""What every benchmark shares: options, processes that start together, rates from time stamps, results as table and JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import math
import os
import platform
import select
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import paragrad as pg
from paragrad.core import kernels
from paragrad.engines.process import devices, forkserver
from paragrad.engines.process.forkserver import Fd
from paragrad.engines.process.segment import Segment

RESULTS = Path(__file__).resolve().parent / "results"

SKIP = 0.2
"""Share of a measurement, from the start barrier on, that is left out of its rate."""

WARM_UP = 3
"""Steps of a peer before the start barrier, as paragrad's workers warm up before theirs."""

STAMPS = 500_000
"""Steps that a peer can note down."""


def source() -> str:
    """A fingerprint of the package that is measured, compiled part included."""
    digest = hashlib.sha256()
    for path in sorted(Path(pg.__file__).parent.rglob("*")):
        if path.suffix in (".py", ".c", ".so"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


SOURCE = source()
"""As it was when this process loaded it."""

Stamps: TypeAlias = Mapping[int, Sequence[tuple[float, int]]]
"""Of each process: (seconds after the start barrier, rows or exchanges done at that moment)."""


# -- rates ----------------------------------------------------------------------------------------------------------


def rate(stamps: Stamps, seconds: float) -> float:
    """Rows a second, summed over the processes, each between its first stamp after the warm-up and its last.

    Each process has its own two clock times, both at the end of a step: with fixed ones a commit of 1,920 rows would
    fall in or out of the interval as a whole.
    """
    total = 0.0
    for rank, mine in stamps.items():
        kept = [(at, rows) for at, rows in mine if at >= SKIP * seconds]
        if len(kept) < 3:
            raise RuntimeError(f"Process {rank} did only {len(kept)} steps in the measured time: give more --seconds.")
        total += sum(rows for _, rows in kept[1:]) / (kept[-1][0] - kept[0][0])
    return total


def together(
    make: Callable[..., Callable[[], None] | None], workers: int, *arguments: Any, seconds: float, rows: int = 1
) -> Stamps:
    """Run ``make(rank, workers, *arguments)()`` again and again in processes of one thread that start at a barrier.

    A process for which ``make`` returns None only serves the others. Steps are noted in shared memory as they
    happen, so that the processes can be killed when time is up: nobody has to agree with its peers on a last step.
    """
    segment = Segment()
    stamps = [segment.allocate(f"stamps{rank}", STAMPS, torch.float64) for rank in range(workers)]
    ready, mouth = os.pipe2(os.O_CLOEXEC)
    barrier = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
    complaints = os.memfd_create("bench-stderr", os.MFD_CLOEXEC)
    children = []
    try:
        for rank in range(workers):
            place = _Place(rank, workers, Fd(segment.fd), segment.layout, Fd(mouth), Fd(barrier), Fd(complaints))
            children.append(forkserver.start(_repeat, make, place, arguments, name=f"bench-{rank}"))
        sentinels = [child.sentinel for child in children]
        arrived = 0
        while arrived < workers:
            found, _, _ = select.select([ready, *sentinels], [], [], 120)
            if not found or found != [ready]:
                raise RuntimeError(f"A process of {make.__name__!r} ended, or hung, before the start.\n{_text(complaints)}")
            arrived += len(os.read(ready, workers))
        began = time.monotonic()
        os.eventfd_write(barrier, workers)
        ended, _, _ = select.select(sentinels, [], [], seconds)
        if ended:
            raise RuntimeError(f"A process of {make.__name__!r} ended while it was measured.\n{_text(complaints)}")
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.join()
        for fd in (ready, mouth, barrier, complaints):
            os.close(fd)
        segment.close()
    found_stamps = [times.numpy()[times.numpy() > 0] - began for times in stamps]
    return {rank: [(float(t), rows) for t in times] for rank, times in enumerate(found_stamps) if len(times)}


@dataclass(frozen=True)
class _Place:
    """What a process of ``together`` is handed."""

    rank: int
    workers: int
    segment: Fd
    layout: dict[str, Any]
    ready: Fd
    barrier: Fd
    complaints: Fd
    """Its stderr: torch complains when its peers are killed, which is of interest only if nobody killed them."""


def _text(fd: int) -> str:
    return os.pread(fd, 1 << 20, 0).decode(errors="replace")


def _repeat(make: Callable[..., Callable[[], None] | None], place: _Place, arguments: tuple[Any, ...]) -> None:
    os.dup2(place.complaints.open(), 2)
    torch.set_num_threads(1)
    stamps: np.ndarray[Any, Any] = Segment(place.segment.open(), place.layout).tensor(f"stamps{place.rank}").numpy()
    step = make(place.rank, place.workers, *arguments)
    for _ in range(WARM_UP if step else 0):
        step()  # type: ignore[misc]
    os.write(place.ready.open(), b".")
    os.eventfd_read(place.barrier.open())
    if step is None:
        signal.pause()
        return
    for index in range(STAMPS):
        step()
        stamps[index] = time.monotonic()


class Commits:
    """A callback of ``pg.Run`` that notes when each applied commit happened, and how many rows it had."""

    def __init__(self) -> None:
        self.stamps: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self.step_seconds: dict[int, list[float]] = defaultdict(list)

    def __call__(self, event: pg.Event) -> None:
        if event.kind == "commit":
            data = event.data
            self.stamps[data["worker"]].append((event.time, data["rows"]))
            self.step_seconds[data["worker"]].append(data["seconds"] / data["steps"])


def trained(
    model: Any, data: Any, scheme: pg.Scheme, *, workers: int, seconds: float, engine: Any = None, **options: Any
) -> Commits:
    """Train for so many seconds on workers of one thread; no validation, no checkpoint in between."""
    commits = Commits()
    with tempfile.TemporaryDirectory(prefix="paragrad-bench-") as folder:
        run = pg.Run(
            out=Path(folder) / "run",
            validate_every=None,
            checkpoint_every=None,
            stop=pg.Stop(seconds=seconds),
            callbacks=(commits,),
        )
        engine = engine or pg.Local(workers=workers, threads=1)
        result = pg.train(model, data, scheme=scheme, engine=engine, epochs=10_000, run=run, **options, verbose=0)
    if result.stopped != "seconds":
        raise RuntimeError(f"The run ended ({result.stopped}) before the measured time was over.")
    return commits


# -- results --------------------------------------------------------------------------------------------------------


@dataclass
class Claim:
    """One row of the README's table."""

    what: str
    value: float
    unit: str = ""
    target: str = ""
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def over(cls, what: str, values: Sequence[float], *, unit: str = "", target: str = "") -> Claim:
        """The median of the repeats, with the smallest and the largest."""
        return cls(what, statistics.median(values), unit, target, min(values), max(values))


@dataclass
class Report:
    """What a benchmark found."""

    name: str
    options: argparse.Namespace
    claims: list[Claim] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    """The raw figures of every repeat."""
    notes: list[str] = field(default_factory=list)
    load: list[float] = field(default_factory=lambda: [os.getloadavg()[0]])

    def column(self, key: str) -> list[float]:
        """One figure over all repeats."""
        return [figures[key] for figures in self.figures if figures.get(key) is not None]

    def ratios(self, above: str, below: str) -> list[float]:
        """The ratio of two figures in each repeat."""
        pairs = [(f.get(above), f.get(below)) for f in self.figures]
        return [a / b for a, b in pairs if a is not None and b is not None]

    def medians(self) -> dict[str, float]:
        """The median of every figure that is a number."""
        keys = dict.fromkeys(k for figures in self.figures for k, value in figures.items() if isinstance(value, int | float))
        return {key: statistics.median(self.column(key)) for key in keys if self.column(key)}

    def write(self) -> None:
        """Save as JSON, through a rename, so that a broken-off benchmark leaves the last result."""
        self.load.append(os.getloadavg()[0])
        if source() != SOURCE:
            self.notes.append("The package was changed while this was measured: the figures may mix two. Measure again.")
            Console().print(self.notes[-1], style="bold red")
        out = Path(self.options.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "name": self.name,
            "command": self.command(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "load_average": self.load,
            "options": {key: value for key, value in vars(self.options).items() if key not in ("out", "role")},
            "claims": [vars(claim) for claim in self.claims],
            "medians": self.medians() if self.claims else {},
            "repeats": self.figures,
            "notes": self.notes,
        }
        draft = out.with_suffix(".tmp")
        draft.write_text(json.dumps(_plain(content), indent=1) + "\n", encoding="utf-8")
        draft.replace(out)
        Console().print(f"Written to {out}", style="dim")

    def command(self) -> str:
        """The command that repeats this, from the project's folder."""
        given = [Path(word).name if word.endswith((".npz", ".json")) else word for word in sys.argv[1:]]
        return shlex.join([".venv/bin/python", f"benchmarks/{self.name}.py", *given])


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def machine() -> dict[str, Any]:
    """Where the figures were taken."""
    model = platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": devices.usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "paragrad": pg.__version__,
        "source": SOURCE,
        "compiled_kernels": kernels.compiled(),
    }


def show(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a small table."""
    table = Table()
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(title, style="bold", highlight=False)
    console.print(table)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and the smallest and the largest in brackets."""
    if not values:
        return "-"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


# -- options --------------------------------------------------------------------------------------------------------


def parser(name: str, about: str | None, *, seconds: float | None, repeats: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(prog=f"benchmarks/{name}.py", description=about)
    if seconds is not None:
        made.add_argument("--seconds", type=float, default=seconds, help="of each measurement (default %(default)s)")
    made.add_argument("--repeats", type=int, default=repeats, help="interleaved (default %(default)s)")
    made.add_argument("--out", default=str(RESULTS / f"{name}.json"), help="where the JSON goes")
    return made


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A temporary folder for run directories and rendezvous files."""
    with tempfile.TemporaryDirectory(prefix="paragrad-bench-") as name:
        yield Path(name)


def rotated(things: Sequence[Any], by: int) -> list[Any]:
    """The same things, beginning with another in each repeat, so that none always comes first."""
    by %= max(len(things), 1)
    return [*things[by:], *things[:by]]
