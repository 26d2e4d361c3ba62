"""Train on an HDF5 file that does not fit into memory: one process reads it piece by piece for all workers.

    python examples/hdf5_stream.py

``pg.Streamed`` takes any object with ``lengths`` and ``read``; here it reads chunks of two data sets of one file. The rows that
are shuffled together (``buffer``) bound the memory, not the size of the file or the number of workers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn

import paragrad as pg

CHUNK = 16_384


class Events:
    """The data sets ``features`` and ``label`` of an HDF5 file, in pieces of one chunk each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with h5py.File(path, locking=False) as file:
            rows = len(file["label"])
        self.lengths = [min(CHUNK, rows - start) for start in range(0, rows, CHUNK)]

    def read(self, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one chunk. Each call opens the file, since processes cannot share an open one."""
        start = piece * CHUNK
        rows = slice(start, start + self.lengths[piece])
        with h5py.File(self.path, locking=False) as file:
            return torch.from_numpy(file["features"][rows]), torch.from_numpy(file["label"][rows])

    def name(self, piece: int) -> str:
        """Return the name of a piece in messages."""
        return str(self.path)


def write(path: Path, rows: int) -> None:
    """Write two overlapping classes with 28 features, chunk by chunk."""
    draw = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        features = file.create_dataset("features", (rows, 28), "float32", chunks=(min(CHUNK, rows), 28))
        label = file.create_dataset("label", (rows,), "int64", chunks=(min(CHUNK, rows),))
        for start in range(0, rows, CHUNK):
            count = min(CHUNK, rows - start)
            signal = draw.integers(0, 2, count)
            features[start : start + count] = draw.standard_normal((count, 28), dtype=np.float32) + 0.2 * signal[:, None]
            label[start : start + count] = signal


def main(thousands: int = 2_000, path: Path = Path("events.h5")) -> pg.Result:
    """Train on the file, with a tenth of its rows held out."""
    if not path.exists():
        write(path, 1_000 * thousands)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(28, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    result = pg.train(
        model,
        pg.Streamed(Events(path)),
        holdout=0.1,
        optimizer="adam:lr=0.001",
        scheme=pg.AGN(window=15),
        engine=pg.Local(workers=2),
        batch_size=256,
    )
    print(f"accuracy {result.summary['test_accuracy']:.3f}, {result.summary['samples_per_second']:,.0f} rows per second")
    return result


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:2]))
