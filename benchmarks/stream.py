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
from paragrad.data.source import Arrays

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
        y = file.create_dataset("y", (rows,), "int64", chunks=(chunk,))
        for number, count in enumerate(groups(rows)):
            start = number * GROUP
            x[start : start + count], y[start : start + count] = group(number, count)


class Rows:
    """A file of row groups as pieces; every process opens it for itself."""

    def __init__(self, path: Path, rows: int) -> None:
        self.path = path
        self.lengths = groups(rows)
        self._file: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def name(self, piece: int) -> str:
        """As messages call it."""
        return str(self.path)


class ParquetRows(Rows):
    """Row groups of a Parquet file."""

    def read(self, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One row group, its columns side by side."""
        from pyarrow import parquet

        self._file = self._file or parquet.ParquetFile(self.path)
        table = self._file.read_row_group(piece, use_threads=False)
        x = np.empty((table.num_rows, WIDTH), dtype=np.float32)
        for k in range(WIDTH):
            x[:, k] = table.column(k).to_numpy()
        return torch.from_numpy(x), torch.from_numpy(table.column(WIDTH).to_numpy().copy())


class Hdf5Rows(Rows):
    """Chunks of an HDF5 file."""

    def read(self, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One chunk."""
        import h5py

        self._file = self._file or h5py.File(self.path, locking=False)
        rows = slice(piece * GROUP, piece * GROUP + self.lengths[piece])
        return torch.from_numpy(self._file["x"][rows]), torch.from_numpy(self._file["y"][rows])


FORMATS: dict[str, tuple[type[Any], Callable[[Path, int], None]]] = {
    "parquet": (ParquetRows, write_parquet),
    "hdf5": (Hdf5Rows, write_hdf5),
}


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


def decoded(pieces: Any, seconds: float) -> float:
    """Rows a second that one process reads when it does nothing else."""
    rows, piece = 0, 0
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        pieces.read(piece % len(pieces.lengths))
        rows += pieces.lengths[piece % len(pieces.lengths)]
        piece += 1
    return rows / (time.monotonic() - began)


def peak(kind: str, path: Path, rows: int, workers: int, seconds: float) -> float:
    """The largest sum of the memory of all processes while a run of its own streams the file."""
    command = [sys.executable, str(Path(__file__).resolve()), "--role", kind, str(path), str(rows), str(workers), str(seconds)]
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
    parser.add_argument("--role", nargs=5, help="internal: be the run whose memory is looked at")
    options = parser.parse_args()
    if options.role:
        kind, path, rows, workers, seconds = options.role
        trained(pg.Streamed(FORMATS[kind][0](Path(path), int(rows))), int(workers), float(seconds))
        return
    report = measure.Report("stream", options)
    with measure.folder() as aside:
        _measure(report, options, options.folder or aside)
    options.folder = None if options.folder is None else str(options.folder)
    report.write()


def _measure(report: measure.Report, options: Any, folder: Path) -> None:
    rows = int(options.gigabytes * 1e9 / ROW_BYTES)
    pieces = {}
    for kind, (make, write) in FORMATS.items():
        path = folder / f"rows-{rows}.{kind}"
        if not path.exists():
            write(path.with_suffix(".part"), rows)
            path.with_suffix(".part").rename(path)
        pieces[kind] = make(path, rows)
    count = -(-int(options.in_memory * 1e9 / ROW_BYTES) // GROUP)
    parts = [pieces["hdf5"].read(piece) for piece in range(min(count, len(pieces["hdf5"].lengths)))]
    held = Arrays(tuple(torch.cat(leaves) for leaves in zip(*parts, strict=True)))
    del parts
    for repeat in range(options.repeats):
        figures: dict[str, float] = {}
        for name in measure.rotated(["in memory", *pieces], repeat):
            data = held if name == "in memory" else pg.Streamed(pieces[name])
            figures[name] = trained(data, options.workers, options.seconds)
        for kind, each in pieces.items():
            figures[f"{kind}, decoder alone"] = decoded(each, READ_SECONDS)
            figures[f"{kind}, peak MB"] = peak(kind, each.path, rows, options.workers, min(options.seconds, 10.0)) / 1e6
        report.figures.append(figures)
    table = []
    for kind in pieces:
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
