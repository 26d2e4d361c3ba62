"""The weights of the lowest validation loss of a run: in memory, and in ``best/`` of its directory for one that is resumed."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paragrad.rundir import checkpoint
from paragrad.rundir.grid import Snapshot

FOLDER = "best"


def lowest(history: Iterable[Mapping[str, Any]], until: float = float("inf")) -> Mapping[str, Any] | None:
    """Return the first validation with the lowest loss, of those up to an update; None where no loss is a number."""
    known = (look for look in history if look["clock"] <= until and look["loss"] == look["loss"])
    return min(known, key=lambda look: look["loss"], default=None)


def wanted(history: Sequence[Mapping[str, Any]], clocks: Iterable[int]) -> set[int]:
    """Return the updates whose weights are the best so far, or were when a checkpoint of one of these clocks was written."""
    found = [lowest(history), *(lowest(history, clock) for clock in clocks)]
    return {look["clock"] for look in found if look is not None}


class Best:
    """Keeps a snapshot, and writes it beside the training."""

    def __init__(self, directory: Path) -> None:
        self.snapshot: Snapshot | None = None
        self._folder = directory / FOLDER
        self._writer: threading.Thread | None = None
        self._error: str | None = None

    def keep(self, snapshot: Snapshot, wanted: Collection[int]) -> str | None:
        """This is the best from now on; once it is written, all but those of the ``wanted`` updates are removed. Return why
        the one before could not be written, if so."""
        failed = self.finish()
        self.snapshot = snapshot
        self._writer = threading.Thread(target=self._write, args=(snapshot, wanted), name="best")
        self._writer.start()
        return failed

    def finish(self) -> str | None:
        """Wait until it is written; return why it could not be, if so."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        return error

    def _write(self, snapshot: Snapshot, wanted: Collection[int]) -> None:
        try:
            checkpoint.write(self._folder, {name: t.cpu() for name, t in snapshot.tensors.items()}, snapshot.facts)
            checkpoint.remove_but(self._folder, wanted)
        except OSError as error:
            self._error = f"{type(error).__name__}: {error}"

    def recall(self, clock: int) -> str | None:
        """Read the snapshot of that update, as an earlier process wrote it; return why it cannot be, if so."""
        try:
            found = checkpoint.load(self._folder / checkpoint.name_of(clock))
        except checkpoint.Damaged as error:
            return str(error)
        self.snapshot = Snapshot(**found.numbers, tensors=found.tensors)
        return None
