"""Points in a run at which the center is validated, and the snapshots taken there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from paragrad.errors import UsageError
from paragrad.types import Vector

EPOCH = "epoch"
Unit: TypeAlias = Literal["epoch", "updates", "seconds"]
LONG = 50_000
"""Least number of rows between two points within an epoch; a shorter epoch has one point, at its end."""
MOST = 10
"""Largest number of points per epoch."""
FORWARD = 3
"""Cost of a training step on a row, relative to validation on it."""
SHARE = 5
"""Validation within an epoch takes at most about 1/SHARE of the computing time."""
NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")


def unit_of(every: Any) -> tuple[Unit, float] | None:
    """Return the unit and the step of ``Run.validate_every``; raise if it is not valid."""
    text = every.strip() if isinstance(every, str) else None
    if every is None:
        return None
    if text == EPOCH:
        return "epoch", 1.0
    if text is not None and text.isascii() and text.isdigit():
        every = int(text)
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return "updates", float(every)
    if text is not None and text.endswith("s") and NUMBER.fullmatch(text[:-1]) and float(text[:-1]) > 0:
        return "seconds", float(text[:-1])
    bare = f"{every:g}" if isinstance(every, float) else text or ""
    hint = f" Did you mean '{float(bare):g}s'?" if NUMBER.fullmatch(bare) and float(bare) > 0 else ""
    raise UsageError(
        f"validate_every={every!r}.{hint} Available: 'epoch', seconds such as '5s', a whole number of updates of the center "
        "such as 200, none (only at the end)."
    )


def points_per_epoch(rows: int, held_out: int) -> int:
    """Return the number of points in an epoch of ``rows`` with ``held_out`` rows to validate on: 1 to 10."""
    return max(1, min(MOST, rows // LONG, FORWARD * rows // (SHARE * max(1, held_out))))


class Grid:
    """The points of a run: the first update at or after each line of the grid.

    The lines are at fixed numbers of rows, updates or seconds from the start of the run. So a resumed run has the same points
    as an uninterrupted one. An update that crosses several lines is one point.
    """

    def __init__(self, every: Any, *, rows: int, held_out: int) -> None:
        self._every = unit_of(every)
        self._rows = rows
        self._parts = points_per_epoch(rows, held_out)
        self._crossed = 0

    def begin(self, samples: int, clock: int, seconds: float) -> bool:
        """Set the state at which a run starts or resumes; return whether it is a point, as it is before the first update."""
        self._crossed = self._line(samples, clock, seconds)
        return self._every is not None and clock == 0

    def crosses(self, samples: int, clock: int, seconds: float) -> bool:
        """Return whether the last update is a point; call it once per update, in order."""
        line = self._line(samples, clock, seconds)
        before, self._crossed = self._crossed, max(line, self._crossed)
        return line > before

    def _line(self, samples: int, clock: int, seconds: float) -> int:
        """Return the number of the last line that was crossed."""
        if self._every is None:
            return 0
        unit, step = self._every
        if unit == "epoch":
            return samples * self._parts // self._rows
        return int((clock if unit == "updates" else seconds) // step)


@dataclass(frozen=True)
class Snapshot:
    """The center at one update."""

    clock: int
    samples: int
    """Rows in the commits applied so far."""
    epoch: float
    """``samples`` in passes over the data."""
    seconds: float
    tensors: Mapping[str, torch.Tensor]
    """``value``, ``buffers`` and ``integers``."""

    @property
    def facts(self) -> dict[str, Any]:
        """Every field except the tensors."""
        return {"seconds": self.seconds, "epoch": self.epoch, "clock": self.clock, "samples": self.samples}

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def fill(tensors: Mapping[str, torch.Tensor], value: Vector, buffers: Vector, integers: Vector) -> None:
    """Copy the tensors of a snapshot into the given vectors."""
    for name, vector in (("value", value), ("buffers", buffers), ("integers", integers)):
        vector.copy_(tensors[name])
