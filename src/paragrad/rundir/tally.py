"""Running totals of a run, from its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paragrad.types import Event

COUNTERS = ("commits", "steps", "samples", "refused", "dropped", "lost")


@dataclass
class Staleness:
    """Updates of the center between the start of a window and the application of its commit."""

    histogram: Counter[int] = field(default_factory=Counter)

    @property
    def mean(self) -> float:
        """Mean over all applied commits."""
        commits = sum(self.histogram.values())
        return sum(value * count for value, count in self.histogram.items()) / commits if commits else 0.0

    @property
    def max(self) -> int:
        """Largest value."""
        return max(self.histogram, default=0)

    def summary(self) -> dict[str, Any]:
        """Return the statistics for summary.json."""
        return {
            "mean": round(self.mean, 4),
            "max": self.max,
            "histogram": {str(value): count for value, count in sorted(self.histogram.items())},
        }


@dataclass
class Tally:
    """Totals over applied commits; ``state`` goes into checkpoints."""

    commits: int = 0
    steps: int = 0
    samples: int = 0
    refused: int = 0
    dropped: int = 0
    lost: int = 0
    bytes: int = 0
    """Bytes of the coded commits that reached the center; 0 without a codec."""
    staleness: Staleness = field(default_factory=Staleness)
    validations: list[dict[str, float]] = field(default_factory=list)
    """Not part of ``state``, because the record holds them."""
    _losses: dict[int, list[float]] = field(default_factory=dict)

    def add(self, event: Event, batches: int) -> None:
        """Count one event; ``batches`` is the number of mini-batches per epoch."""
        data = event.data
        if "bytes" in data:
            self.bytes += data["bytes"]
        if event.kind == "commit":
            self.commits += 1
            self.steps += data["steps"]
            self.samples += data["rows"]
            self.staleness.histogram[data["staleness"]] += 1
            if data["loss"] is None:
                return
            first = data["batches"][0] if data["batches"] else 0
            epoch = (first if isinstance(first, int) else first[0]) // batches
            total = self._losses.setdefault(epoch, [0.0, 0.0])
            total[0] += data["loss"] * data["rows"]
            total[1] += data["rows"]
        elif event.kind == "refused":
            if data["why"] == "late":
                self.dropped += 1
            else:
                self.refused += 1
        elif event.kind == "lost":
            self.lost += 1
        elif event.kind == "validation":
            self.validations.append(dict(data))

    @property
    def train_loss(self) -> float | None:
        """Mean training loss over the last epoch."""
        if not self._losses:
            return None
        total, rows = self._losses[max(self._losses)]
        return total / rows if rows else None

    def state(self) -> dict[str, Any]:
        """Return the totals as plain numbers, for a checkpoint."""
        return {
            **{name: getattr(self, name) for name in (*COUNTERS, "bytes")},
            "staleness": {str(k): v for k, v in self.staleness.histogram.items()},
            "losses": {str(k): v for k, v in self._losses.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Tally:
        """Return the tally of a ``state``."""
        tally = cls(**{name: state[name] for name in COUNTERS}, bytes=state.get("bytes", 0))
        tally.staleness.histogram.update({int(k): v for k, v in state["staleness"].items()})
        tally._losses = {int(k): list(v) for k, v in state["losses"].items()}
        return tally
