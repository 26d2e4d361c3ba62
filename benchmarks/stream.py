"""Rows streamed from a file that need not fit into memory, beside the same rows in memory: rows a second, and peak memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import measure, memory

import paragrad as pg
from paragrad.data.source import Arrays, joined

WIDTH, GROUP, BATCH = 28, 65_536, 128
ROW_BYTES = WIDTH * 4 + 8
READ_SECONDS = 3.0


# -- the files -------------------------------------------------------------------------------------------------------


def group(number: int, rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The features and labels of one row group, drawn by its number."""
    draw = np.random.default_rng(number)
    labels = draw.integers(0, 2, rows)
    return draw.standard_normal((rows, WIDTH), dtype=np.float32) + 0.2 * labels[:, None].astype(np.float32), labels


def groups(rows: int) -> list[int]:
    """How many rows each row group has."""
    return [min(GROUP, rows - start) for start in range(0, rows, GROUP)]


def write_parquet(path: Path, rows: int) -> None:
    """One column for each feature, not compressed: noise does not become smaller."""
    import pyarrow as pa
    from pyarrow import parquet

    names = [f"f{k}" for k in range(WIDTH)]
    schema = pa.schema([*((name, pa.float32()) for name in names), ("label", pa.int64())])
    with parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for number, count in enumerate(groups(rows)):
            x, y = group(number, count)
            columns = [pa.array(np.ascontiguousarray(x[:, k])) for k in range(WIDTH)]
            writer.write_table(pa.table([*columns, pa.array(y)], schema=schema), row_group_size=GROUP)


def write_hdf5(path: Path, rows: int) -> None:
    """Two datasets in chunks of a row group."""
    import h5py

    with h5py.File(path, "w") as file:
        chunk = min(GROUP, rows)
        x = file.create_dataset("x", (rows, WIDTH), "float32", chunks=(chunk, WIDTH))
        y = file.create_dataset("label", (rows,), "int64", chunks=(chunk,))
        for number, count in enumerate(groups(rows)):
            start = number * GROUP
            x[start : start + count], y[start : start + count] = group(number, count)


FORMATS: dict[str, Callable[[Path, int], None]] = {"parquet": write_parquet, "h5": write_hdf5}


def table_of(path: str | Path) -> pg.Table:
    """The file as anyone would give it."""
    return pg.Table(path, label="label", stream=True)


# -- the runs --------------------------------------------------------------------------------------------------------


def model() -> nn.Module:
    """Two hidden layers of 256."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))


def trained(data: Any, workers: int, seconds: float) -> float:
    """Rows a second."""
    options = {"batch_size": BATCH, "optimizer": "adam:lr=0.001"}
    commits = measure.trained(model(), data, pg.AGN(window=15), workers=workers, seconds=seconds, **options)
    return measure.rate(commits.stamps, seconds)


def decoded(table: pg.Table, seconds: float) -> float:
    """Rows a second that one process reads, as tensors, when it does nothing else."""
    rows, piece, pieces = 0, 0, table.open()
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        pieces.read(piece % len(pieces.lengths))
        rows += pieces.lengths[piece % len(pieces.lengths)]
        piece += 1
    return rows / (time.monotonic() - began)


def peak(path: Path, workers: int, seconds: float) -> float:
    """The largest sum of the memory of all processes while a run of its own streams the file."""
    command = [sys.executable, str(Path(__file__).resolve()), "--role", str(path), str(workers), str(seconds)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    found, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            with contextlib.suppress(OSError):
                found.append(sum(memory.look(child.pid).values()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = child.wait()
    ended.set()
    watcher.join()
    if code:
        raise RuntimeError(f"The run ended with status {code}: {' '.join(command)}")
    return max(found)


def main() -> None:
    parser = measure.parser(Path(__file__).stem, __doc__, seconds=15, repeats=3)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of each file (default %(default)s)")
    parser.add_argument(
        "--in-memory", type=float, default=0.5, help="gigabytes of the same rows in memory (default %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the files are kept, and found again (default: a temporary one)")
    parser.add_argument("--role", nargs=3, help="internal: be the run whose memory is looked at")
    options = parser.parse_args()
    if options.role:
        path, workers, seconds = options.role
        trained(table_of(path), int(workers), float(seconds))
        return
    report = measure.Report("stream", options)
    with measure.folder() as aside:
        _measure(report, options, options.folder or aside)
    options.folder = None if options.folder is None else str(options.folder)
    report.write()


def _measure(report: measure.Report, options: Any, folder: Path) -> None:
    rows = int(options.gigabytes * 1e9 / ROW_BYTES)
    files = {kind: folder / f"rows-{rows}.{kind}" for kind in FORMATS}
    for kind, path in files.items():
        if not path.exists():
            FORMATS[kind](path.with_suffix(".part"), rows)
            path.with_suffix(".part").rename(path)
    opened = table_of(files["h5"]).open()
    wanted = int(options.in_memory * 1e9 / ROW_BYTES)
    parts = [opened.read(piece) for piece in range(len(opened.lengths)) if sum(opened.lengths[:piece]) < wanted]
    held = Arrays(joined(parts))
    del parts
    for repeat in range(options.repeats):
        figures: dict[str, float] = {}
        for name in measure.rotated(["in memory", *files], repeat):
            data = held if name == "in memory" else table_of(files[name])
            figures[name] = trained(data, options.workers, options.seconds)
        for kind, path in files.items():
            figures[f"{kind}, decoder alone"] = decoded(table_of(path), READ_SECONDS)
            figures[f"{kind}, peak MB"] = peak(path, options.workers, min(options.seconds, 10.0)) / 1e6
        report.figures.append(figures)
    table = []
    for kind in files:
        ratios = report.ratios(kind, "in memory")
        what = f"rows/s streamed from {options.gigabytes:g} GB of {kind}, {options.workers} workers, of those in memory"
        report.claims.append(measure.Claim.over(what, ratios, unit="x", target=">= 0.9"))
        memory_of = report.column(f"{kind}, peak MB")
        what = f"peak memory of all processes, {options.gigabytes:g} GB of {kind} streamed"
        report.claims.append(measure.Claim.over(what, memory_of, unit="MB"))
        table.append(
            [
                kind,
                measure.spread(report.column(kind), 0),
                measure.spread(report.column("in memory"), 0),
                measure.spread(ratios),
                measure.spread(report.column(f"{kind}, decoder alone"), 0),
                measure.spread(memory_of, 0),
            ]
        )
    heads = ["", "rows/s streamed", "rows/s in memory", "ratio (>= 0.9)", "decoder alone, rows/s", "peak memory, MB"]
    measure.show(f"{rows:,} rows of {WIDTH} features, {os.cpu_count()} cores", heads, table)


if __name__ == "__main__":
    main()
