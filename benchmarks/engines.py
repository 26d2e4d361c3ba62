"""One run.toml on every engine: locally, simulated, and by hand over the network; accuracies of several seeds side by side."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import measure

PARAGRAD = [sys.executable, "-m", "paragrad"]
RUN = """\
data = {data}
model = "mlp:128"
scheme = "agn:window=5"
optimizer = "adam:lr=0.003"
epochs = {epochs}
seed = {seed}
"""


def local(toml: Path, out: Path) -> None:
    """Two processes and shared memory."""
    _finish(_start("train", str(toml), "--workers", "2", "--out", str(out), "--quiet"))


def vector(toml: Path, out: Path) -> None:
    """Two simulated workers of equal speed."""
    _finish(_start("train", str(toml), "--engine", "vector", "--workers", "2", "--out", str(out), "--quiet"))


def network(toml: Path, out: Path) -> None:
    """A center and two workers, each a command of its own; one of them sends its vectors, the other shares memory."""
    center = _start("serve", str(toml), "--workers", "2", "--out", str(out), "--quiet")
    workers = [_start("join", str(out), "--quiet"), _start("join", str(out), "--no-shared", "--quiet")]
    for process in (center, *workers):
        _finish(process)


ENGINES: dict[str, Callable[[Path, Path], None]] = {"local": local, "vector": vector, "network, by hand": network}


def _start(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*PARAGRAD, *words])


def _finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise RuntimeError(f"{process.args} ended with status {process.returncode}")


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=0, repeats=5)
    parser.add_argument("--data", default="digits", help="What to train on; MNIST as an .npz.")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    report = measure.Report("engines", options)
    for seed in range(options.repeats):
        figures: dict[str, float] = {}
        for name in measure.rotated(list(ENGINES), seed):
            with measure.folder() as folder:
                toml = folder / "run.toml"
                data = str(Path(options.data).resolve()) if Path(options.data).exists() else options.data
                toml.write_text(RUN.format(data=json.dumps(data), epochs=options.epochs, seed=seed), encoding="utf-8")
                ENGINES[name](toml, folder / "run")
                summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
                figures[name] = summary["test_accuracy"]
        report.figures.append(figures)
    rows = []
    for name in ENGINES:
        found = report.column(name)
        rows.append([name, measure.spread(found, 4), f"{statistics.mean(found):.4f}", f"{statistics.stdev(found):.4f}"])
        report.claims.append(measure.Claim.over(f"accuracy on {Path(options.data).stem}, {name}", found))
    measure.show(f"One run.toml, {options.repeats} seeds", ["", "accuracy: median (min-max)", "mean", "deviation"], rows)
    report.write()


if __name__ == "__main__":
    main()
