"""Two datasets of an HDF5 file as pieces, light to import."""

from __future__ import annotations

from typing import Any

import torch


class Hdf5:
    """Rows of ``x`` and ``y``, chunk by chunk."""

    def __init__(self, path: str, chunk: int = 10_000) -> None:
        import h5py

        self.path, self.chunk = path, chunk
        with h5py.File(path, locking=False) as file:
            rows = len(file["y"])
        self.lengths = [min(chunk, rows - start) for start in range(0, rows, chunk)]

    def read(self, piece: int) -> Any:
        """One chunk; the file is opened by whoever reads."""
        import h5py

        with h5py.File(self.path, locking=False) as file:
            part = slice(piece * self.chunk, piece * self.chunk + self.lengths[piece])
            return torch.from_numpy(file["x"][part]), torch.from_numpy(file["y"][part])
