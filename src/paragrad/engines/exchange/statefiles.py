"""Files with workers' private state, between them and the center; each file is complete or missing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paragrad.rundir.checkpoint import write_tensors
from paragrad.types import WorkerState

FOLDER = ".states"
"""Name of the folder in the run directory; it exists while the run does."""


class StateFiles:
    """A folder that processes of one machine share. ``put`` writes a file, ``take`` removes it."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER

    def put(self, worker: int, number: int, state: Mapping[str, torch.Tensor]) -> bool:
        """Write the state of a worker's commit of that number (negative: of its joining). Return False if the disk is full."""
        path = self._path(worker, number)
        aside = path.with_suffix(".tmp")
        try:
            self._folder.mkdir(exist_ok=True)
            write_tensors(aside, state)
            aside.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            return False
        return True

    def take(self, worker: int, number: int) -> WorkerState:
        """Read and remove a file; return an empty state if it cannot be read."""
        path = self._path(worker, number)
        try:
            return load_file(path)
        except (OSError, SafetensorError):
            return {}
        finally:
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, worker: int, number: int) -> Path:
        return self._folder / f"{worker}.{number}.safetensors"
