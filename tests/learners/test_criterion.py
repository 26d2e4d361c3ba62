"""Which axis of the outputs has the classes, and which answers are right: by every loss that says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from paragrad.learners.criterion import class_axis, sums


def accuracy(loss: Any, output: Any, target: Any) -> float | None:
    found = sums(loss, output, target, None).get("accuracy")
    return None if found is None else found[0] / found[1]


def last(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def first(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


def smoothed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), label_smoothing=0.1)


def later_counts_more(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(output.movedim(-1, 1), target, reduction="none")
    return (each * torch.arange(1, each.shape[1] + 1).reshape(1, -1, *[1] * (each.ndim - 2))).mean()


def by_probability(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(output.softmax(-1).log().flatten(0, -2), target.flatten())


LOSSES = [(last, -1), (smoothed, -1), (later_counts_more, -1), (by_probability, -1), (first, 1), (nn.CrossEntropyLoss(), 1)]


@given(
    loss=st.sampled_from(LOSSES),
    rows=st.integers(1, 4),
    time=st.integers(1, 7),
    classes=st.integers(2, 7),
    second=st.sampled_from([None, 3]),
    certain=st.sampled_from([1.0, 12.0, 1000.0]),
    seed=st.integers(0, 99),
)
def test_where_the_loss_is_next_to_nothing_all_answers_are_right(loss, rows, time, classes, second, certain, seed):
    function, axis = loss
    torch.manual_seed(seed)
    target = torch.randint(0, classes, (rows, time) if second is None else (rows, time, second))
    output = (F.one_hot(target, classes) * certain).float().movedim(-1, axis)
    found = sums(function, output, target, None)
    assert found["accuracy"][0] == found["accuracy"][1] == target.numel()
    if certain > 10:
        assert found["loss"][0] / found["loss"][1] < 1 or function is smoothed
    wrong = (target + 1) % classes
    assert sums(function, output, wrong, None)["accuracy"][0] == 0


def test_the_axis_is_the_one_that_the_target_lacks():
    target = torch.zeros(4, 5, dtype=torch.long)
    assert class_axis(last, torch.zeros(4, 5, 7), target) == 2
    assert class_axis(first, torch.zeros(4, 7, 5), target) == 1
    assert class_axis(nn.CrossEntropyLoss(), torch.zeros(4, 5, 7), target) is None  # torch itself refuses it
    assert class_axis(last, torch.zeros(4, 6, 7), target) is None
    assert class_axis(last, torch.zeros(4, 5), target) is None
    assert class_axis(F.mse_loss, torch.zeros(4, 5, 5), target.float()) is None


def test_a_loss_that_no_output_moves_leaves_the_last_axis():
    assert class_axis(lambda output, target: (output * 0).sum(), torch.zeros(4, 5, 5), torch.zeros(4, 5, dtype=torch.long)) == 2


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), lambda output, target: F.cross_entropy(output, target)])
def test_accuracy_leaves_out_what_the_loss_ignores(loss: Any) -> None:
    output, target = torch.eye(4), torch.tensor([0, 1, -100, 0])
    assert accuracy(loss, output, target) == pytest.approx(2 / 3)


def test_accuracy_is_there_where_it_has_a_meaning() -> None:
    output = torch.eye(4)
    assert accuracy(nn.CrossEntropyLoss(ignore_index=1), output, torch.tensor([0, 1, 1, 0])) == 0.5
    assert accuracy(nn.CrossEntropyLoss(), output, torch.eye(4).roll(1, 0)) == 0.0
    assert accuracy(nn.BCELoss(), torch.tensor([0.2, 0.9]), torch.tensor([0.0, 0.0])) == 0.5
    assert accuracy(nn.MSELoss(), output, output) is None
    weight = torch.tensor([1.0, 2.0, 3.0, -1.0])
    found = sums(nn.CrossEntropyLoss(), output, torch.tensor([0, 1, 3, 0]), weight)["accuracy"]
    assert found == (3.0, 5.0)
