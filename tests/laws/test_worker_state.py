"""What a worker keeps to itself is part of a checkpoint: a run that is stopped and resumed is the unbroken one, to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paragrad.core.job import Job
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial, same
from paragrad.laws.bowl import SIZE, Bowl
from paragrad.learners.learner import Step
from paragrad.schemes.scheme import Scheme
from tests.laws.table import TABLE

ROWS = Arrays(torch.randn(48, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
SCHEMES = [scheme for scheme, _ in TABLE]
PACED = 0.3
STOPS = st.lists(st.integers(0, 30), min_size=1, max_size=3).map(sorted)


@dataclass
class Rolling(Bowl):
    """A bowl whose optimiser has a momentum, a count of steps and a schedule, and whose model has an average and a counter."""

    velocity: torch.Tensor = field(default_factory=lambda: torch.zeros(SIZE, dtype=torch.float64))
    made: int = 0
    rate: float = 1.0

    def __post_init__(self) -> None:
        self.buffers, self.integers = torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)

    def set_progress(self, progress: float) -> None:
        self.rate = 1.0 - PACED * progress

    def _slope(self, batch):
        self.buffers.lerp_(batch.mean().expand(2), 0.1)
        self.integers.add_(1)
        return super()._slope(batch)

    def step(self, batch) -> Step:
        slope, step = self._slope(batch)
        self.made += 1
        self.velocity.mul_(0.9).add_(slope)
        self.weights.sub_(self.lr * self.rate / self.made**0.2 * self.velocity)
        return step

    def state(self) -> dict[str, torch.Tensor]:
        return {"velocity": self.velocity, "made": torch.tensor(self.made)} if self.made else {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.velocity.copy_(state["velocity"])
        self.made = int(state["made"])


def serial(scheme: Scheme, workers: int, plan: Plan) -> Serial:
    job = Job(scheme, lambda device: Rolling(), ROWS, None, plan, 48)
    return Serial(job, workers, stolen=job.stolen("auto", workers), brings=True)


def resumed(scheme: Scheme, workers: int, plan: Plan, stops: list[int]) -> Serial:
    """A run that was stopped after so many commits, and again."""
    run = serial(scheme, workers, plan)
    for commits in stops:
        run.run(commits=commits)
        again = serial(scheme, workers, plan)
        again.center.restore(run.center.snapshot())
        again.applied = list(run.applied)
        run = again
    run.run()
    return run


def equal(mine: Serial, theirs: Serial) -> None:
    assert mine.center.clock == theirs.center.clock
    assert same(mine.center.value, theirs.center.value)
    assert same(mine.center.state.buffers, theirs.center.state.buffers)
    assert same(mine.center.state.integers, theirs.center.state.integers)
    ours, others = mine.center.snapshot().tensors(), theirs.center.snapshot().tensors()
    assert {name: tensor.tolist() for name, tensor in ours.items()} == {
        name: tensor.tolist() for name, tensor in others.items()
    }


def needs_others(scheme: Scheme) -> bool:
    """Whether there is no such thing as one worker of it."""
    return getattr(scheme, "backups", 0) > 0 or getattr(scheme, "splits", 1) > 1


def is_in_rounds(scheme: Scheme) -> bool:
    return not needs_others(scheme) and scheme.quorum(3) == 3 and scheme.held and scheme.late != "drop"


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if not needs_others(scheme)], ids=repr)
@given(stops=STOPS)
@settings(max_examples=5)
def test_one_worker_that_is_stopped_anywhere_goes_on_as_if_it_had_not_been(scheme, stops):
    plan = Plan(46, 4, 3, 0)
    equal(resumed(scheme, 1, plan, stops), resumed(scheme, 1, plan, []))


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if is_in_rounds(scheme)], ids=repr)
@given(stops=STOPS, workers=st.integers(2, 3), size=st.integers(4, 9))
@settings(max_examples=10)
def test_rounds_that_are_stopped_anywhere_go_on_as_if_they_had_not_been(scheme, stops, workers, size):
    # With overlap, who sits out a round that is to come is not known after a resume: epochs must divide evenly.
    plan = Plan(48, 4 if scheme.overlap else size, 3, 0)
    equal(resumed(scheme, workers, plan, stops), resumed(scheme, workers, plan, []))
