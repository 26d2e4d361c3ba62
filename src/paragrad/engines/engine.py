"""The interface of engines to ``pg.train``: an engine defines where workers run."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.learners.learner import Learner
from paragrad.rundir.checkpoint import Checkpoint
from paragrad.rundir.session import Session


@runtime_checkable
class Engine(Protocol):
    """Runs the workers and the center of a job."""

    @property
    def workers(self) -> int:
        """Number of workers."""

    def threads_for(self, learner: Learner) -> int:
        """Return the number of threads of a worker's model."""

    def prepare(self) -> None:
        """Begin to start processes that take time to start."""

    def check(self, job: Job, learner: Learner) -> None:
        """Raise if the engine cannot run the job; called before any file is written."""

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        """Train from the learner's weights, and return the center at the end."""


@runtime_checkable
class Recalls(Protocol):
    """An engine whose center leaves its state in memory when it is killed."""

    def recall(self, directory: Path) -> Checkpoint | None:
        """Return the state that a killed center left for this run directory; None if there is none."""
