"""Writes checkpoints in a background thread, while training continues."""

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
    """The outcome of one write."""

    clock: int
    arrived: int
    """Number of arrivals at the center that the checkpoint holds."""
    without: list[int]
    """Workers with applied commits whose private state is missing."""
    error: str | None = "its writer failed"
    """Error of the write; None after success, so that a writer that dies counts as failed."""
    sync_error: OSError | None = None
    """Error of the sync of the record before it."""


@dataclass
class CheckpointWriter:
    """Writes one checkpoint at a time."""

    directory: Path
    names: Mapping[str, Any] = field(default_factory=dict)
    """Place of each tensor of the model in the vectors (see ``Checkpoint.names``)."""
    writing: int = -1
    """Update of the current or last checkpoint."""
    _thread: threading.Thread | None = None
    _written: Written | None = None

    def write(self, about: Written, tensors: Mapping[str, torch.Tensor], numbers: dict[str, Any], record: int) -> None:
        """Start to write; the record (a file descriptor) is synced first, because it must hold what the checkpoint holds."""
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
        """Wait for the current write and return its outcome; None if there is none, or it was returned before."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        return self._written
