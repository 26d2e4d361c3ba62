"""Memory of a run, in multiples of the parameter vector and of the data, beside what the design says it must take."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import measure

import paragrad as pg

WIDTH, LAYERS = 2_041, 6
VECTOR = LAYERS * WIDTH * WIDTH * 4
"""Bytes of 25M parameters in six layers; ``layer`` has about as many in one, the worst case for malloc."""
ONE_WIDTH = 5_000
ARRAY = 200_000_000
ROLES = ("parent", "fork server", "workers", "shared")
"""What is private to each kind of process, and the shared memory, once."""


class One(nn.Module):
    """A model of one parameter that takes the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


# -- the run that is looked at ---------------------------------------------------------------------------------------


def run(kind: str, workers: int) -> None:
    """Train until ended from outside; says on stdout when the first commit has been applied."""
    torch.manual_seed(0)
    model: nn.Module = One()
    if kind == "model":
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    elif kind == "layer":
        model = nn.Linear(ONE_WIDTH, ONE_WIDTH, bias=False)
    x = torch.rand(ARRAY // (1_000 * 4), 1_000) if kind == "data" else torch.rand(64, ONE_WIDTH if kind == "layer" else WIDTH)
    told: list[pg.Event] = []

    def tell(event: pg.Event) -> None:
        if event.kind == "commit" and not told:
            told.append(event)
            print("first", flush=True)

    with measure.folder() as folder, contextlib.suppress(pg.Interrupted):
        settings = pg.Run(out=folder / "run", validate_every=None, checkpoint_every=None, callbacks=(tell,))
        engine = pg.Local(workers=workers, threads=1)
        options: dict[str, Any] = {"loss": "mse", "optimizer": "sgd:lr=0.0001", "epochs": 1_000_000, "batch_size": 4}
        pg.train(model, x, scheme=pg.AGN(window=5), engine=engine, run=settings, **options, verbose=0)


# -- looking ---------------------------------------------------------------------------------------------------------


def look(root: int) -> dict[str, float]:
    """Bytes of the process, its fork server and their children: private by role, and all memfds, mapped or not, once."""
    found = dict.fromkeys(ROLES, 0.0)
    files: dict[tuple[int, int], int] = {}
    for pid, role in _family(root):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
                if line.startswith(("Pss_Anon:", "Pss_File:")):
                    found[role] += int(line.split()[1]) * 1024
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path).startswith("/memfd:"):
                        status = os.stat(entry.path)
                        files[status.st_dev, status.st_ino] = status.st_blocks * 512
    found["shared"] = float(sum(files.values()))
    return found


def _family(root: int) -> Iterator[tuple[int, str]]:
    yield root, "parent"
    for child in _children(root):
        yield child, "fork server"
        for grandchild in _children(child):
            yield grandchild, "workers"


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except OSError:
        return []


def sample(kind: str, workers: int, seconds: float) -> dict[str, float]:
    """Run it in a process of its own; the median of each role while it runs, and the peak of the sum from the start."""
    command = [sys.executable, str(Path(__file__).resolve()), "--role", kind, str(workers)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peaks: list[float] = []
    watching = threading.Event()

    def watch() -> None:
        while not watching.wait(0.02):
            peaks.append(sum(look(child.pid).values()))

    try:
        watcher = threading.Thread(target=watch)
        watcher.start()
        assert child.stdout is not None
        if child.stdout.readline().strip() != "first":
            raise RuntimeError(f"The run ended before its first commit: {' '.join(command)}")
        time.sleep(1)
        looks = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            looks.append(look(child.pid))
            time.sleep(0.05)
    finally:
        watching.set()
        watcher.join()
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    found = {role: statistics.median(one[role] for one in looks) for role in ROLES}
    return {**found, "total": sum(found.values()), "peak": max(peaks)}


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=3, repeats=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--role", nargs=2, help="internal: be the run that is looked at")
    options = parser.parse_args()
    if options.role:
        run(options.role[0], int(options.role[1]))
        return
    report = measure.Report("memory", options)
    for _ in range(options.repeats):
        figures: dict[str, float] = {}
        for workers in options.workers:
            empty = sample("nothing", workers, options.seconds)
            for kind, unit in (("model", VECTOR), ("layer", ONE_WIDTH**2 * 4), ("data", ARRAY)):
                full = sample(kind, workers, options.seconds)
                figures |= {f"{kind}, {workers} workers, {role}": (full[role] - empty[role]) / unit for role in full}
            figures |= {f"nothing, {workers} workers, {role}, MB": empty[role] / 1e6 for role in empty}
        report.figures.append(figures)
    for workers in options.workers:
        _tables(report, workers)
    report.notes.append(
        "Expected: shared 2 (center) + 2 per worker (its weights, its anchor) + 1 (the model as sent to the workers); "
        "parent 2 (the caller's model, the result's); each worker 1 (gradients), and freed blocks that it keeps for speed."
    )
    report.write()


def _tables(report: measure.Report, workers: int) -> None:
    expected = {"parent": 2, "fork server": 0, "workers": workers, "shared": 3 + 2 * workers}
    expected["total"] = sum(expected.values())
    for kind, noun, should in (
        ("model", f"vectors of {VECTOR / 1e6:.0f} MB, {LAYERS} layers", expected),
        ("layer", f"vectors of {ONE_WIDTH**2 * 4 / 1e6:.0f} MB, one layer", expected),
        ("data", f"arrays of {ARRAY / 1e6:.0f} MB", {"parent": 1, "fork server": 0, "workers": 0, "shared": 1, "total": 2}),
    ):
        rows = []
        for role in (*ROLES, "total", "peak"):
            found = report.column(f"{kind}, {workers} workers, {role}")
            base = report.column(f"nothing, {workers} workers, {role}, MB")
            rows.append([role, measure.spread(found), str(should.get(role, "")), measure.spread(base, 0)])
        title = f"Beyond an empty run, {workers} workers, in {noun}"
        measure.show(title, ["", "found", "expected", "empty run, MB"], rows)
        found, target = report.column(f"{kind}, {workers} workers, total"), should["total"]
        what = f"memory of {workers} workers, AGN with SGD, in {noun}"
        report.claims.append(measure.Claim.over(what, found, unit="x", target=f"{target} by design"))


if __name__ == "__main__":
    main()
