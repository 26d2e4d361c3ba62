"""When the center is looked at: a grid over the rows, the updates or the seconds of a run, and what is seen at its points."""

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
"""Rows between two points within an epoch, at least: a shorter epoch has one point, at its end."""
MOST = 10
"""Points within one epoch, at most."""
FORWARD = 3
"""A training step on a row costs about so many times what validating on it costs."""
SHARE = 5
"""Points within an epoch are so few that validation takes at most about one part in this many of the computing."""
NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")


def unit_of(every: Any) -> tuple[Unit, float] | None:
    """Return the unit of ``Run.validate_every`` and its step; raise where it has none."""
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


def points_per_epoch(rows: int, held: int) -> int:
    """How many points an epoch of ``rows`` has, with ``held`` rows to validate on: 1, and up to 10 where it is long."""
    return max(1, min(MOST, rows // LONG, FORWARD * rows // (SHARE * max(1, held))))


class Grid:
    """The points of a run: an update is one where it is the first at or behind a line of the grid.

    The lines lie at fixed numbers of rows, updates or seconds from the beginning of the run. So a run that was stopped and
    resumed has the points of an unbroken one, and an update that crosses several lines is one point.
    """

    def __init__(self, every: Any, *, rows: int, held: int) -> None:
        self._every = unit_of(every)
        self._rows = rows
        self._parts = points_per_epoch(rows, held)
        self._crossed = 0

    def begin(self, samples: int, clock: int, seconds: float) -> bool:
        """Go on from here, where a run begins or is resumed; True where this is a point itself: before the first update."""
        self._crossed = self._line(samples, clock, seconds)
        return self._every is not None and clock == 0

    def crosses(self, samples: int, clock: int, seconds: float) -> bool:
        """Whether the update that led here is a point; asked once for each, in order."""
        line = self._line(samples, clock, seconds)
        before, self._crossed = self._crossed, max(line, self._crossed)
        return line > before

    def _line(self, samples: int, clock: int, seconds: float) -> int:
        """The number of the last line at or before here."""
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
    """Rows in the commits that were applied until then."""
    epoch: float
    """The same in passes over the data."""
    seconds: float
    tensors: Mapping[str, torch.Tensor]
    """``value``, ``buffers`` and ``integers``."""

    @property
    def facts(self) -> dict[str, Any]:
        """Everything but the tensors."""
        return {"seconds": self.seconds, "epoch": self.epoch, "clock": self.clock, "samples": self.samples}

    @property
    def bytes(self) -> int:
        """What its tensors take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def fill(tensors: Mapping[str, torch.Tensor], value: Vector, buffers: Vector, integers: Vector) -> None:
    """Write the tensors of a snapshot into these."""
    for name, mine in (("value", value), ("buffers", buffers), ("integers", integers)):
        mine.copy_(tensors[name])
