"""The result of ``train``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragrad.rundir.tally import Staleness


@dataclass(frozen=True)
class Result:
    """The trained model, with the measurements of its run."""

    model: Any
    """The trained module, in evaluation mode; for a custom learner, the learner."""
    directory: Path
    summary: dict[str, Any]
    """The contents of summary.json."""
    staleness: Staleness
    history: list[dict[str, float]]
    """All validations of the center: ``seconds``, ``epoch``, ``clock``, ``samples`` and ``loss``; with ``accuracy`` and
    metrics, if there are any."""
    stopped: str
    """Reason for the end: finished, seconds, target, patience or callback."""

    def __repr__(self) -> str:
        """Return one line, since a notebook displays the last value of a cell."""
        figures = {"accuracy": self.accuracy, "loss": self.loss, "seconds": self.seconds}
        known = "".join(f"{name}={value:.4g}, " for name, value in figures.items() if value is not None)
        return f"Result({known}stopped={self.stopped!r}, directory={str(self.directory)!r})"

    # -- of the model ---------------------------------------------------------------------------------------

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the validation rows; None without such rows, or if the model does not predict classes."""
        return self.summary["test_accuracy"]  # type: ignore[no-any-return]

    @property
    def loss(self) -> float | None:
        """Loss on the validation rows; without such rows, on the training rows of the last epoch."""
        found: float | None = self.summary["test_loss"]
        return self.train_loss if found is None else found

    @property
    def train_loss(self) -> float | None:
        """Mean loss over the mini-batches of the last epoch, each taken before its step."""
        return self.summary["train_loss"]  # type: ignore[no-any-return]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics on the validation rows, by name."""
        return dict(self.summary["metrics"])

    @property
    def kept(self) -> dict[str, Any]:
        """The ``weights`` of the model, "best" or "last", with their ``epoch`` and ``clock``."""
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
        """Requested passes over the rows. A run that stopped early made fewer: see ``samples``."""
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
        """Commits that arrived too late for their round."""
        return int(self.summary["dropped_commits"])

    @property
    def lost_workers(self) -> int:
        """Workers that ended before the run did."""
        return int(self.summary["lost_workers"])

    @property
    def bytes_sent(self) -> int:
        """Bytes of all vectors that workers sent to the center."""
        return int(self.summary["bytes_sent"])

    # -- of the settings ------------------------------------------------------------------------------------

    @property
    def scheme(self) -> str:
        """Scheme as text, such as ``agn:window=15``."""
        return str(self.summary["scheme"])

    @property
    def engine(self) -> str:
        """Engine as text, such as ``local:workers=4``."""
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
        """Trained parameters of the model."""
        return int(self.summary["parameters"])

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.summary["seed"])
