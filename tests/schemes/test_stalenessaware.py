"""StalenessAware: a step with η / max(1, τ)."""

from __future__ import annotations

import pytest
import torch

import paragrad as pg
from paragrad.learners.torch import TorchLearner
from tests.schemes.golden import center_of, near, plain, run, send


def test_the_rate_is_divided_by_the_staleness():
    center = center_of(pg.StalenessAware(), workers=3, lr=0.1)
    send(center, 0, [1.0, 2.0, -4.0], version=0)
    assert near(center.value, 0.9, 1.8, 3.4)
    send(center, 1, [1.0, 2.0, -4.0], version=0)  # τ = 1 is a whole step as well
    assert near(center.value, 0.8, 1.6, 3.8)
    replies = send(center, 2, [1.0, 2.0, -4.0], version=0)
    assert near(center.value, 0.75, 1.5, 4.0)
    assert near(replies[2].value, 0.75, 1.5, 4.0)
    send(center, 0, [10.0, 0.0, 0.0], version=0)
    assert torch.allclose(center.value[0], torch.tensor(0.75 - 1 / 3, dtype=torch.float64))


def test_it_is_the_step_that_is_scaled_so_that_it_holds_for_adam():
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 1, bias=False)
    ends = []
    for staleness in (1, 4):
        learner = TorchLearner(module, torch.nn.MSELoss(), lambda parameters: torch.optim.Adam(parameters, lr=0.1))
        value, optimizer = learner.weights.clone(), learner.center_optimizer()
        view = View(value, optimizer)
        commit = pg.types.Commit(0, 1, 0, torch.tensor([1.0, -2.0, 3.0]), 1, staleness=staleness)
        pg.StalenessAware().apply(view, [commit])
        ends.append(value - learner.weights)
    assert torch.allclose(ends[0], torch.tensor([-0.1, 0.1, -0.1]), atol=1e-4)
    assert torch.allclose(ends[1], ends[0] / 4, atol=1e-5)


class View:
    """As much of a center as the scheme asks for."""

    def __init__(self, value, optimizer):
        self.value, self.optimizer = value, optimizer

    def step(self, gradient, scale=1.0):
        self.optimizer.step(self.value, gradient, scale)


def test_one_worker_is_plain_training():
    assert torch.allclose(run(pg.StalenessAware(), 1).center.value, plain(), atol=1e-13)


def test_a_longer_window_is_a_larger_batch():
    window = run(pg.StalenessAware(window=3), 1, rows=48, epochs=1)
    assert {commit.steps for commit in window.applied} == {3}
    assert window.center.clock == 4


@pytest.mark.parametrize(("options", "said"), [({"window": 0}, "window=0"), ({"bound": -1}, "bound=-1")])
def test_a_bad_value_is_refused(options, said):
    with pytest.raises(pg.UsageError, match=said):
        pg.StalenessAware(**options)


def test_nothing_is_known_to_diverge():
    assert pg.StalenessAware().warnings(pg.SchemePlan(32)) == []
