"""The weights with the lowest validation loss: in memory, and in ``best/`` of the run directory for a resumed run."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paragrad.rundir import checkpoint
from paragrad.rundir.grid import Snapshot

FOLDER = "best"


def lowest(history: Iterable[Mapping[str, Any]], until: float = float("inf")) -> Mapping[str, Any] | None:
    """Return the first validation with the lowest loss up to an update; None if no loss is a number."""
    known = (look for look in history if look["clock"] <= until and look["loss"] == look["loss"])
    return min(known, key=lambda look: look["loss"], default=None)


def wanted(history: Sequence[Mapping[str, Any]], clocks: Iterable[int]) -> set[int]:
    """Return the updates with the best weights: so far, and at each of these checkpoints."""
    found = [lowest(history), *(lowest(history, clock) for clock in clocks)]
    return {look["clock"] for look in found if look is not None}


class Best:
    """Keeps the best snapshot and writes it in a background thread."""

    def __init__(self, directory: Path) -> None:
        self.snapshot: Snapshot | None = None
        self._folder = directory / FOLDER
        self._writer: threading.Thread | None = None
        self._error: str | None = None

    def keep(self, snapshot: Snapshot, wanted: Collection[int]) -> str | None:
        """Replace the best snapshot; return the error of the previous write, if any.

        Once the snapshot is written, the files of all updates but the ``wanted`` ones are removed.
        """
        error = self.finish()
        self.snapshot = snapshot
        self._writer = threading.Thread(target=self._write, args=(snapshot, wanted), name="best")
        self._writer.start()
        return error

    def finish(self) -> str | None:
        """Wait for the current write; return its error, if any."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        return error

    def _write(self, snapshot: Snapshot, wanted: Collection[int]) -> None:
        try:
            tensors = {name: tensor.cpu() for name, tensor in snapshot.tensors.items()}
            checkpoint.save(self._folder, tensors, snapshot.facts, kept=wanted)
        except OSError as error:
            self._error = f"{type(error).__name__}: {error}"

    def recall(self, clock: int) -> str | None:
        """Read the snapshot that an earlier process wrote at this update; return the error, if any."""
        try:
            found = checkpoint.load(self._folder / checkpoint.name_of(clock))
        except checkpoint.Damaged as error:
            return str(error)
        self.snapshot = Snapshot(**found.numbers, tensors=found.tensors)
        return None
