"""What an engine is, to ``pg.train``: where workers run."""

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
    """Where workers run."""

    @property
    def workers(self) -> int:
        """How many."""

    def threads_for(self, learner: Learner) -> int:
        """Threads that a worker's model computes with."""

    def prepare(self) -> None:
        """Begin to start what takes time."""

    def check(self, job: Job, learner: Learner) -> None:
        """Raise where it cannot do what the job asks for; nothing has been written yet."""

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        """Train; return the center as it is in the end."""


@runtime_checkable
class Recalls(Protocol):
    """An engine whose center leaves its state in memory when it is killed."""

    def recall(self, directory: Path) -> Checkpoint | None:
        """What it has left in this run directory."""
