"""SoftSync: the mean of ⌊n/s⌋ gradients, each scaled by its staleness, and nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.core.center import Center
from paragrad.data.leases import Leases
from paragrad.laws.bowl import Bowl
from paragrad.learners.torch import TorchLearner
from paragrad.types import CenterView, Commit, Vector
from tests.schemes.golden import START, center_of, close, commit, serial, vector


def test_nobody_waits_and_the_center_steps_when_half_of_the_workers_have_come():
    center = center_of(pg.SoftSync(splits=2), workers=4)
    replies = commit(center, 3, (2.0, 0.0, 0.0))
    assert replies[3].value.tolist() == [1.0, 2.0, 3.0]
    assert center.clock == 0
    commit(center, 1, (0.0, 4.0, 0.0))
    assert close(center.value, vector(1.0 - 0.1, 2.0 - 0.2, 3.0))
    assert center.clock == 1


def test_one_worker_may_fill_a_step_alone():
    center = center_of(pg.SoftSync(), workers=2)
    commit(center, 0, (2.0, 0.0, 0.0))
    commit(center, 0, (0.0, 4.0, 0.0), sequence=2)
    assert close(center.value, vector(0.9, 1.8, 3.0))


def test_each_gradient_is_scaled_by_its_own_staleness():
    center = center_of(pg.SoftSync(), workers=2)
    for sequence in (1, 2, 3, 4, 5, 6):
        commit(center, 0, (0.0, 0.0, 0.0), sequence=sequence, version=(sequence - 1) // 2)
    assert center.clock == 3
    commit(center, 0, (2.0, 0.0, 0.0), sequence=7, version=3)
    commit(center, 1, (0.0, 6.0, 3.0), version=0)
    assert close(center.value, vector(1.0 - 0.1 * 2 / 2, 2.0 - 0.1 * (6 / 3) / 2, 3.0 - 0.1 * (3 / 3) / 2))


def test_rows_weigh_beside_staleness():
    center = center_of(pg.SoftSync(), workers=2)
    for sequence in (1, 2, 3, 4):
        commit(center, 0, (0.0, 0.0, 0.0), sequence=sequence, version=(sequence - 1) // 2)
    commit(center, 0, (4.0, 0.0, 0.0), sequence=5, version=2, weight=1.0)
    commit(center, 1, (0.0, 4.0, 0.0), version=0, weight=3.0)
    assert close(center.value, vector(1.0 - 0.1 * 4 / 4, 2.0 - 0.1 * 3 * (4 / 2) / 4, 3.0))


@pytest.mark.parametrize(("optimizer", "moved"), [("Adam", 0.1 / 4), ("SGD", 0.1 * 8 / 4)])
def test_staleness_scales_the_step_of_adam_and_not_its_gradient(optimizer, moved):
    module = nn.Linear(3, 1, bias=False).double()
    learner = TorchLearner(module, nn.MSELoss(), partial(getattr(torch.optim, optimizer), lr=0.1))
    center = center_of(pg.SoftSync(splits=2), workers=2, optimizer=learner.center_optimizer())
    center.state.clock = 4  # four updates that moved nothing: the optimiser is fresh
    commit(center, 0, (8.0, 8.0, 8.0), version=0)
    assert close(center.value, vector(*START) - moved, within=1e-6)


@dataclass(frozen=True)
class _StalenessAware(pg.Scheme):
    """c <- one step of the optimiser on g, its rate divided by max(1, τ)."""

    ships = "gradient"

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        (only,) = commits
        center.step(only.value, 1 / max(1, only.staleness))
        return center.value


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_with_as_many_splits_as_workers_every_gradient_steps_at_a_rate_divided_by_its_staleness(workers):
    soft, aware = serial(pg.SoftSync(splits=workers), workers), serial(_StalenessAware(), workers)
    assert torch.equal(soft.run().value, aware.run().value)
    assert max(done.staleness for done in soft.applied) == workers - 1


@pytest.mark.parametrize(("splits", "workers", "quorum"), [(1, 1, 1), (1, 5, 5), (2, 5, 2), (3, 5, 1), (5, 5, 1)])
def test_the_center_gathers_the_whole_part_of_workers_by_splits(splits, workers, quorum):
    assert pg.SoftSync(splits=splits).quorum(workers) == quorum


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pg.SoftSync(splits=0), "splits=0"),
        (lambda: pg.SoftSync(window=3), "window=3.*leave window at 1"),
        (lambda: pg.SoftSync(bound=0), "bound=0"),
        (lambda: pg.SoftSync(splits=3).quorum(2), "splits=3 with workers=2.*splits can be 1 to 2"),
    ],
)
def test_a_bad_value_is_refused_with_the_remedy(make, said):
    with pytest.raises(pg.UsageError, match=said):
        make()


def test_the_statistics_of_a_commit_that_waits_are_those_it_came_with():
    leases = Leases(batches=40, epochs=1, workers=2)
    buffers = vector(0.0)
    center = Center(
        pg.SoftSync(), vector(*START), workers=2, leases=leases, buffers=buffers, optimizer=Bowl(lr=0.1).center_optimizer()
    )
    for rank in range(2):
        center.join(rank)
    slot = vector(4.0)
    first = Commit(0, 1, 0, vector(0.0, 0.0, 0.0), steps=1, buffers=slot, batches=center.leases.held(0)[:1])
    center.receive(first)
    slot.fill_(100.0)  # the worker is answered at once, and lays its next commit in the same place
    center.receive(changed(first, worker=1, buffers=vector(4.0), batches=center.leases.held(1)[:1]))
    assert center.state.buffers.tolist() == [4.0]
