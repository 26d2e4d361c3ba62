"""Writes checkpoints in a thread of its own, beside the training."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paragrad.rundir import checkpoint


@dataclass
class Written:
    """What became of a checkpoint."""

    clock: int
    arrived: int
    """Number of arrivals at the center that it holds."""
    without: list[int]
    """Workers with applied commits whose private state is not in it."""
    error: str | None = "its writer failed"
    """Why it could not be written; set to None once it was: what was not seen to be written is not announced."""
    sync_error: OSError | None = None
    """Why the record before it may not be on the disk."""


@dataclass
class CheckpointWriter:
    """One checkpoint at a time."""

    directory: Path
    names: Mapping[str, Any] = field(default_factory=dict)
    """Where each tensor of the model is in the vectors of a checkpoint."""
    writing: int = -1
    """Update of the checkpoint that is being written, or was last."""
    _thread: threading.Thread | None = None
    _written: Written | None = None

    def write(self, about: Written, tensors: Mapping[str, torch.Tensor], numbers: dict[str, Any], record: int) -> None:
        """Begin to write; ``record``: the descriptor of the record, which must be on the disk before the checkpoint is."""
        assert self._thread is None

        def write() -> None:
            try:
                os.fsync(record)
            except OSError as error:
                about.sync_error = error
            try:
                checkpoint.save(self.directory, tensors, numbers, self.names)
                about.error = None
            except OSError as error:
                about.error = f"{type(error).__name__}: {error}"

        self.writing, self._written = about.clock, about
        self._thread = threading.Thread(target=write, name="checkpoint")
        self._thread.start()

    def finish(self) -> Written | None:
        """Wait for the checkpoint that is being written; return what became of it, once."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, written = None, self._written
        return written
