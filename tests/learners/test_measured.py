"""Metrics of the user's own are those of all rows, whatever the mini-batches are; one that raises costs nothing but itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paragrad.data.source import Arrays, Weighted
from paragrad.evaluation import metrics
from paragrad.learners.learner import Reports
from paragrad.learners.measured import Measured
from paragrad.learners.torch import TorchLearner


def auc(output: torch.Tensor, target: torch.Tensor) -> float:
    return metrics.roc_auc((output[:, 1] - output[:, 0]).numpy(), target.numpy() == 1)


WHOLE = {
    "largest": lambda output, target: (output.argmax(1) - target).abs().max(),
    "median": lambda output, target: output[:, 0].median(),
    "quantile": lambda output, target: np.quantile(output.numpy(), 0.9),
    "auc": auc,
}


class Largest:
    """As torchmetrics writes them: pieces are joined by the metric."""

    def reset(self) -> None:
        self.value = -math.inf
        self.weight = 0.0

    def update(self, preds: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        self.value = max(self.value, float(preds.max()))
        self.weight += float(len(target) if weight is None else weight.sum())

    def compute(self) -> dict[str, Any]:
        return {"peak": torch.tensor(self.value), "total": self.weight}


def data(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, 4), torch.randint(0, 2, (rows,))


def learner(**options: Any) -> TorchLearner:
    torch.manual_seed(0)
    return TorchLearner(nn.Linear(4, 2), nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.1), **options)


@given(rows=st.integers(2, 60), size=st.integers(1, 60), seed=st.integers(0, 20))
def test_a_metric_is_that_of_all_rows_whatever_the_mini_batches_are(rows, size, seed):
    x, y = data(rows, seed)
    made = learner(metrics=WHOLE | {"piecewise": Largest()})
    found = made.evaluate(Arrays((x, y)), size)
    output = made.module(x).detach()
    for name, metric in WHOLE.items():
        assert found[name] == pytest.approx(float(metric(output, y)), rel=1e-5, nan_ok=True), name
    assert found["peak"] == pytest.approx(float(output.max()))
    assert found["total"] == rows


def test_weights_of_rows_go_to_a_metric_that_takes_them():
    x, y = data(10, 0)
    found = learner(metrics={"mine": Largest()}).evaluate(Arrays(Weighted((x, y), torch.full((10,), 3.0))), 4)
    assert found["total"] == 30


def test_outputs_that_are_nested_are_joined_leaf_by_leaf():
    measured = Measured({"both": lambda output, target: output["a"].sum() + output["b"][0].sum() + target.sum()}, print)
    for _ in range(3):
        measured.add({"a": torch.ones(2, 3), "b": (torch.ones(2),)}, torch.ones(2), None)
    assert measured.result() == {"both": 18 + 6 + 6}


def bad(output: Any, target: Any) -> float:
    raise ZeroDivisionError("of my own")


class Breaks(Largest):
    """One that raises in the second piece."""

    names = ("peak", "total")

    def update(self, preds: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        super().update(preds, target)
        if self.weight > 5:
            raise RuntimeError("too much")


def test_a_metric_that_raises_is_nan_and_said_and_the_others_are_there():
    made = learner(metrics={"bad": bad, "breaks": Breaks(), "many": lambda output, target: output} | WHOLE)
    assert isinstance(made, Reports)
    said: list[str] = []
    made.report = said.append
    found = made.evaluate(Arrays(data(12, 1)), 4)
    assert all(math.isnan(found[name]) for name in ("bad", "peak", "total", "many"))
    assert math.isfinite(found["auc"])
    assert math.isfinite(found["loss"])
    assert len(said) == 3
    assert any("'bad' raised ZeroDivisionError: of my own" in text for text in said)


def test_outputs_of_different_shapes_ask_for_a_metric_that_joins_them():
    said: list[str] = []
    measured = Measured({"longest": lambda output, target: output.shape[1], "peak": Largest()}, said.append)
    for length in (3, 5):
        measured.add(torch.ones(2, length), torch.ones(2), None)
    found = measured.result()
    assert math.isnan(found["longest"])
    assert found["peak"] == 1
    assert "reset, update and compute" in said[0]
