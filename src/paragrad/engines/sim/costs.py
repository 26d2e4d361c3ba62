"""What a run on a virtual cluster cost: bytes on the wire, seconds of waiting and of computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Costs:
    """What the cluster cost, by worker."""

    up: list[int]
    """Bytes to the center."""
    down: list[int]
    """Bytes from the center."""
    idle: list[float]
    """Seconds that a worker waited for an answer."""
    computing: list[float]
    """Seconds that it spent in windows that ended."""

    @classmethod
    def of(cls, workers: int) -> Costs:
        """Nothing yet."""
        return cls([0] * workers, [0] * workers, [0.0] * workers, [0.0] * workers)

    def summary(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "bytes_to_center": self.up,
            "bytes_from_center": self.down,
            "idle_seconds": [round(seconds, 6) for seconds in self.idle],
            "computing_seconds": [round(seconds, 6) for seconds in self.computing],
        }
