"""What ``train`` returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragrad.tally import Staleness


@dataclass(frozen=True)
class Result:
    """The trained model, and what was measured on the way."""

    model: Any
    """The trained module; for a learner of your own, the learner."""
    directory: Path
    summary: dict[str, Any]
    """The contents of summary.json."""
    staleness: Staleness
    history: list[dict[str, float]]
    """Every validation of the center: seconds, clock, loss and metrics."""
    stopped: str
    """Why it ended: finished, seconds, target, patience or callback."""

    def __repr__(self) -> str:
        """A line: a notebook shows what a cell ends with."""
        figures = {"accuracy": self.accuracy, "loss": self.loss, "seconds": self.seconds}
        known = "".join(f"{name}={value:.4g}, " for name, value in figures.items() if value is not None)
        return f"Result({known}stopped={self.stopped!r}, directory={str(self.directory)!r})"

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the validation rows, where there are any."""
        return self.summary["test_accuracy"]  # type: ignore[no-any-return]

    @property
    def loss(self) -> float | None:
        """Loss on the validation rows, or on the training rows of the last epoch where there are none."""
        found = self.summary["test_loss"]
        return self.summary["train_loss"] if found is None else found  # type: ignore[no-any-return]

    @property
    def seconds(self) -> float:
        """Training time from the start barrier to the last commit."""
        return self.summary["seconds"]  # type: ignore[no-any-return]
