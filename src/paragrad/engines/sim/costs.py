"""Costs of a run on a virtual cluster: bytes sent, seconds of waiting and of computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Costs:
    """Costs per worker."""

    up: list[int]
    """Bytes sent to the center."""
    down: list[int]
    """Bytes received from the center."""
    idle: list[float]
    """Seconds of waiting for an answer."""
    computing: list[float]
    """Seconds in windows that ended."""

    @classmethod
    def of(cls, workers: int) -> Costs:
        """Return zero costs for this many workers."""
        return cls([0] * workers, [0] * workers, [0.0] * workers, [0.0] * workers)

    def summary(self) -> dict[str, Any]:
        """Return the costs as they appear in summary.json."""
        return {
            "bytes_to_center": self.up,
            "bytes_from_center": self.down,
            "idle_seconds": [round(seconds, 6) for seconds in self.idle],
            "computing_seconds": [round(seconds, 6) for seconds in self.computing],
        }
