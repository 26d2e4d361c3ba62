"""What train returns: every figure that is documented is there, and is the summary's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paragrad as pg
from tests.conftest import train

FIGURES = sorted(name for name, value in vars(pg.Result).items() if isinstance(value, property))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> pg.Result:
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))
    data = (x, (x[:, 0] > 0).long())
    out = tmp_path_factory.mktemp("result") / "run"
    metrics = {"largest": lambda output, target: output.max()}
    return train(model, data, out, holdout=0.2, epochs=2, engine=pg.Vector(workers=2), metrics=metrics)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_of_a_result_is_the_summarys(result: pg.Result, name: str) -> None:
    key = {"accuracy": "test_accuracy", "loss": "test_loss"}.get(name, name)
    assert getattr(result, name) == result.summary[key]
    assert getattr(pg.Result, name).__doc__


def test_every_number_of_the_summary_is_a_figure_of_the_result(result: pg.Result) -> None:
    other = {"test_accuracy", "test_loss", "virtual", "wall_seconds"}
    for name, value in result.summary.items():
        if isinstance(value, int | float) and name not in other:
            assert name in FIGURES, name


def test_every_entry_of_the_history_has_the_documented_keys(result: pg.Result) -> None:
    assert result.history
    for entry in result.history:
        assert {"seconds", "epoch", "clock", "samples", "loss", "accuracy", "largest"} <= set(entry)
        assert entry["epoch"] == pytest.approx(entry["samples"] / 320)
    assert result.history[-1]["epoch"] == result.epochs


def test_figures_count_what_was_trained(result: pg.Result) -> None:
    assert result.samples == 2 * 320
    assert result.epochs == 2
    assert result.steps == result.commits * result.steps // result.commits == 80
    assert result.workers == 2
    assert result.metrics["largest"] > 0


def test_the_trained_model_is_in_evaluation_mode_and_the_one_given_is_left_as_it_was(
    tmp_path: Path, model: nn.Module, rows: Any
) -> None:
    result = train(model, rows, tmp_path / "run")
    assert model.training
    assert not any(module.training for module in result.model.modules())


def test_a_metric_that_is_not_a_number_is_null_in_strict_json(tmp_path):
    rows = torch.randn(40, 3), torch.arange(40) % 2
    metrics = {"mine": lambda output, target: float("nan")}
    result = train(nn.Linear(3, 2), rows, tmp_path, holdout=0.25, metrics=metrics, engine=pg.Vector(workers=2), epochs=1)
    assert math.isnan(result.history[-1]["mine"])
    for text in [(tmp_path / "summary.json").read_text(), *(tmp_path / "record.jsonl").read_text().splitlines()]:
        json.loads(text, parse_constant=pytest.fail)
