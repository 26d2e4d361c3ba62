"""All that a worker needs to start; frozen, and the same for every worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paragrad.data.plan import Plan
from paragrad.data.source import Source
from paragrad.learners.learner import Learner
from paragrad.schemes.scheme import Scheme


@dataclass(frozen=True)
class Job:
    """What is trained, on what, and how the workers cooperate."""

    scheme: Scheme
    make_learner: Callable[[str], Learner]
    """Builds the learner on a device; every worker builds the same."""
    train: Source
    validation: Source | None
    plan: Plan
    evaluation_batch: int
