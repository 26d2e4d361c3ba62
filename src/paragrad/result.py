"""What ``train`` returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragrad.rundir.tally import Staleness


@dataclass(frozen=True)
class Result:
    """The trained model, and what was measured on the way."""

    model: Any
    """The trained module, in evaluation mode; for a learner of your own, the learner."""
    directory: Path
    summary: dict[str, Any]
    """The contents of summary.json."""
    staleness: Staleness
    history: list[dict[str, float]]
    """Every validation of the center: ``seconds``, ``epoch``, ``clock``, ``samples``, ``loss``, and ``accuracy`` and metrics
    where there are any."""
    stopped: str
    """Why it ended: finished, seconds, target, patience or callback."""

    def __repr__(self) -> str:
        """A line: a notebook shows what a cell ends with."""
        figures = {"accuracy": self.accuracy, "loss": self.loss, "seconds": self.seconds}
        known = "".join(f"{name}={value:.4g}, " for name, value in figures.items() if value is not None)
        return f"Result({known}stopped={self.stopped!r}, directory={str(self.directory)!r})"

    # -- of the model ---------------------------------------------------------------------------------------

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the validation rows, where there are any and it has a meaning."""
        return self.summary["test_accuracy"]  # type: ignore[no-any-return]

    @property
    def loss(self) -> float | None:
        """Loss on the validation rows, or on the training rows of the last epoch where there are none."""
        found: float | None = self.summary["test_loss"]
        return self.train_loss if found is None else found

    @property
    def train_loss(self) -> float | None:
        """Mean loss over the mini-batches of the last epoch, each before its step."""
        return self.summary["train_loss"]  # type: ignore[no-any-return]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics on the validation rows by name."""
        return dict(self.summary["metrics"])

    @property
    def kept(self) -> dict[str, Any]:
        """Which ``weights`` the model has, "best" or "last", and the ``epoch`` and ``clock`` that they are of."""
        return dict(self.summary["kept"])

    # -- of the training ------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Training time from the start barrier to the last commit; virtual seconds on a simulated cluster."""
        return float(self.summary["seconds"])

    @property
    def samples_per_second(self) -> float:
        """Rows trained on per second of real time."""
        return float(self.summary["samples_per_second"])

    @property
    def epochs(self) -> int:
        """Passes over the rows that were asked for; a run that was stopped made fewer, see ``samples``."""
        return int(self.summary["epochs"])

    @property
    def samples(self) -> int:
        """Rows trained on, each counted once per epoch."""
        return int(self.summary["samples"])

    @property
    def steps(self) -> int:
        """Mini-batches trained on."""
        return int(self.summary["steps"])

    @property
    def commits(self) -> int:
        """Commits that the center applied."""
        return int(self.summary["commits"])

    @property
    def refused_commits(self) -> int:
        """Commits that the center rejected, such as those that held NaN."""
        return int(self.summary["refused_commits"])

    @property
    def dropped_commits(self) -> int:
        """Commits that came too late for their round."""
        return int(self.summary["dropped_commits"])

    @property
    def lost_workers(self) -> int:
        """Workers that ended before the run did."""
        return int(self.summary["lost_workers"])

    @property
    def bytes_sent(self) -> int:
        """Bytes of the vectors that workers sent to the center."""
        return int(self.summary["bytes_sent"])

    # -- of the settings ------------------------------------------------------------------------------------

    @property
    def scheme(self) -> str:
        """The scheme as text."""
        return str(self.summary["scheme"])

    @property
    def engine(self) -> str:
        """The engine as text."""
        return str(self.summary["engine"])

    @property
    def workers(self) -> int:
        """Workers that the run was started with."""
        return int(self.summary["workers"])

    @property
    def batch_size(self) -> int:
        """Rows in one worker's mini-batch."""
        return int(self.summary["batch_size"])

    @property
    def parameters(self) -> int:
        """Trained numbers of the model."""
        return int(self.summary["parameters"])

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.summary["seed"])
