"""Rows with weights: what they mean for the loss, for evaluation and for every scheme that joins gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paragrad as pg
from paragrad.core.job import Job
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial
from paragrad.learners.batchable import why_not
from paragrad.learners.torch import TorchLearner

ROWS = 53


def rows(seed: int = 3) -> pg.Weighted:
    """Weights of which a quarter is negative."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(ROWS, 4, dtype=torch.float64, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)
    return pg.Weighted((x, y), torch.randn(ROWS, dtype=torch.float64, generator=generator) + 0.7)


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


@settings(deadline=None, max_examples=15)
@given(
    workers=st.integers(1, 4),
    batch=st.integers(3, 9),
    optimizer=st.sampled_from(["SGD", "Adam", "RMSprop"]),
    classes=st.booleans(),
)
def test_syncsgd_is_one_process_with_the_whole_weighted_batch(workers: int, batch: int, optimizer: str, classes: bool) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64) if classes else None)
    make = partial(getattr(torch.optim, optimizer), lr=0.02)
    source = Arrays(rows())
    job = Job(pg.SyncSGD(), lambda device: TorchLearner(module(), loss, make), source, None, Plan(ROWS, batch, 2, 0), ROWS)
    center = Serial(job, workers).run()
    big = TorchLearner(module(), loss, make)
    plan = Plan(ROWS, batch * workers, 2, 0)
    for position in range(plan.positions):
        big.step(source.batch(plan.rows_of(position)))
    assert torch.allclose(center.value, big.weights, atol=1e-10, rtol=0)


def test_a_row_of_weight_2_is_that_row_twice_and_one_of_weight_0_is_none() -> None:
    x, y = rows().rows
    learner = TorchLearner(module(), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))
    weighted, plain = torch.empty_like(learner.weights), torch.empty_like(learner.weights)
    step = learner.gradient(pg.Weighted((x[:3], y[:3]), torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64)), weighted)
    chosen = torch.tensor([0, 0, 2])
    other = learner.gradient((x[chosen], y[chosen]), plain)
    assert torch.allclose(weighted, plain, atol=1e-14)
    assert step.loss == pytest.approx(other.loss)
    assert step.weight == other.weight == 3


def test_weights_that_sum_to_nothing_do_no_harm() -> None:
    learner = TorchLearner(module(), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))
    x, y = rows().rows
    step = learner.step(pg.Weighted((x[:2], y[:2]), torch.tensor([1.0, -1.0], dtype=torch.float64)))
    assert step.weight == 2
    assert torch.isfinite(learner.weights).all()


LOSSES = {
    "crossentropy": (nn.CrossEntropyLoss(), lambda o, y: nn.functional.cross_entropy(o, y, reduction="none")),
    "smoothed": (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda o, y: nn.functional.cross_entropy(o, y, reduction="none", label_smoothing=0.1),
    ),
    "function": (nn.functional.cross_entropy, lambda o, y: nn.functional.cross_entropy(o, y, reduction="none")),
    "squares": (nn.MSELoss(), lambda o, y: ((o - y) ** 2).mean(1)),
    "absolute": (nn.functional.l1_loss, lambda o, y: (o - y).abs().mean(1)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_the_sum_of_weighted_losses_over_rows_in_training_and_in_evaluation(name: str) -> None:
    loss, each = LOSSES[name]
    told = rows()
    x, y = told.rows
    if name in ("squares", "absolute"):
        y = torch.randn(ROWS, 3, dtype=torch.float64)
    learner = TorchLearner(module(), loss, partial(torch.optim.SGD, lr=0.0))
    expected = float((told.weight * each(learner.module(x).detach(), y)).sum()) / ROWS
    assert learner.step(pg.Weighted((x, y), told.weight)).loss == pytest.approx(expected)
    found = learner.evaluate(Arrays(pg.Weighted((x, y), told.weight)), 10)
    assert found["loss"] == pytest.approx(expected)


def test_accuracy_is_the_weight_of_right_rows_over_all_weight() -> None:
    told = rows()
    x, y = told.rows
    y = y.clone()
    y[5] = -100  # does not count
    learner = TorchLearner(module(), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.0))
    right = (learner.module(x).argmax(1) == y).double()
    counts = (y != -100).double()
    expected = float((told.weight * right).sum() / (told.weight * counts).sum())
    assert learner.evaluate(Arrays(pg.Weighted((x, y), told.weight)), 10)["accuracy"] == pytest.approx(expected)
    ones = learner.evaluate(Arrays(pg.Weighted((x, y), torch.ones(ROWS, dtype=torch.float64))), 10)
    assert ones["accuracy"] == pytest.approx(learner.evaluate(Arrays((x, y)), 10)["accuracy"])


def test_a_loss_of_ones_own_without_a_loss_for_each_row_is_told_what_to_do() -> None:
    def mine(output: Any, target: Any) -> torch.Tensor:
        return (output.argmax(1) - target).double().mean()

    learner = TorchLearner(module(), mine, partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(pg.UsageError, match=r"Rows have weights, but mine gives one number.*torch.nn.CrossEntropyLoss"):
        learner.step(rows())


def test_the_vector_engine_says_that_it_computes_them_one_after_another() -> None:
    learner = TorchLearner(module(), nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))
    assert why_not(learner, Arrays(rows()), Plan(ROWS, 4, 1, 0)) == "the rows have weights"
    assert why_not(learner, Arrays(rows().rows), Plan(ROWS, 4, 1, 0)) is None
