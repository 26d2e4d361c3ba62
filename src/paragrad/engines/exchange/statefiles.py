"""What workers keep to themselves, on its way between them and the center: in files that are whole or not there."""

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
"""In the run directory, for as long as somebody works there."""


class StateFiles:
    """A folder that processes of one machine share. A file is there from when it is laid down until it is taken."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER

    def put(self, worker: int, number: int, state: Mapping[str, torch.Tensor]) -> bool:
        """Lay down what belongs to a worker's commit of that number (below 0: to its joining); False on a full disk."""
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
        """What was laid down there; nothing where it cannot be read."""
        path = self._path(worker, number)
        try:
            return load_file(path)
        except (OSError, SafetensorError):
            return {}
        finally:
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Nobody takes anything any more."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, worker: int, number: int) -> Path:
        return self._folder / f"{worker}.{number}.safetensors"
