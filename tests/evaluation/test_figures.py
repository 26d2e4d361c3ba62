"""Metrics by name are the figures of evaluate, in training as afterwards, in Python as on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import paragrad as pg
from paragrad.cli.main import app
from paragrad.config.options import read_config
from paragrad.errors import UsageError
from paragrad.learners import kerasmodel
from paragrad.models import builtin
from tests.conftest import train


def write(path: Path, rows: int = 300, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    kind = np.where(x[:, 0] + rng.normal(0, 0.7, rows) > 0.5, "gamma", "hadron")
    weight, mass = rng.uniform(0.2, 3, rows), 100 + 20 * x[:, 1] + rng.normal(0, 1, rows)
    lines = [
        "a,b,c,kind,w,mass",
        *(f"{p},{q},{r},{k},{w},{m}" for (p, q, r), k, w, m in zip(x, kind, weight, mass, strict=True)),
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


SETTINGS: dict[str, Any] = {
    "scheme": pg.SyncSGD(),
    "engine": pg.Vector(workers=2),
    "optimizer": "adam:lr=0.02",
    "epochs": 2,
    "holdout": 0.25,
}


@pytest.mark.parametrize("weight", [None, "w"])
@pytest.mark.parametrize("loss", ["crossentropy", "bce"])
def test_figures_of_classes_are_those_of_evaluate(tmp_path: Path, weight: str | None, loss: str) -> None:
    table = pg.Table(write(tmp_path / "rows.csv"), features=["a", "b", "c"], label="kind", weight=weight)
    made = builtin.build("mlp:8", (3,), 2 if loss == "crossentropy" else 1)
    names = ["auc", "log_loss", "f1_macro", "f1:positive=gamma", "accuracy"]
    result = train(made, table, tmp_path / "run", loss=loss, metrics=names, **SETTINGS)
    loaded = pg.load(result.directory)
    found = loaded.evaluate()
    for name, value in result.metrics.items():
        assert value == pytest.approx(found[name], rel=1e-6), name
    assert set(result.metrics) == {"auc", "log_loss", "f1_macro", "f1"}
    assert found["positive"] == "gamma"
    other = loaded.evaluate(positive="hadron")
    assert other["positive"] == "hadron"
    assert other["f1"] != found["f1"]
    assert other["auc"] == pytest.approx(found["auc"])
    assert (found["f1"] + other["f1"]) / 2 == pytest.approx(found["f1_macro"])
    assert set(result.history[-1]) >= {"auc", "f1"}
    assert read_config(result.directory / "run.toml")["metric"] == names


def test_figures_of_numbers_are_in_the_units_of_the_label(tmp_path: Path) -> None:
    table = pg.Table(
        write(tmp_path / "rows.csv"),
        features=["a", "b", "c"],
        label="mass",
        transforms=[pg.Standardise(), pg.Standardise(columns="mass")],
    )
    result = train(builtin.build("linear", (3,), 1), table, tmp_path / "run", metrics=["mae", "mse", "r2"], **SETTINGS)
    found = pg.load(result.directory).evaluate()
    assert result.metrics == {name: pytest.approx(found[name], rel=1e-5) for name in ("mae", "mse", "r2")}
    assert found["mae"] > 2


def largest(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.max()


def test_names_and_functions_are_given_in_one_list(tmp_path: Path, model: nn.Module, rows: Any) -> None:
    result = train(model, rows, tmp_path / "run", metrics=["auc", largest], holdout=0.2)
    assert set(result.metrics) == {"auc", "largest"}
    again = pg.load(result.directory, model=model).evaluate(rows, metrics=[largest, "auc"])
    expected = float(result.model(rows[0]).detach().max())
    assert again["largest"] == pytest.approx(expected)
    assert again["positive"] == "1"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("auc", r"metrics='auc' is a string, but it must be a list: write metrics=\['auc'\]"),
        (["acu"], r"Unknown metric 'acu'. Did you mean 'auc'\?"),
        (["mae"], "metric 'mae', but the model chooses among classes"),
        (["auc:positive=1"], "only f1 has a field"),
        (["f1:positive=7"], "Unknown class '7'"),
        ([3], "neither a name nor a function"),
        ({"auc": "auc"}, r"Give names in a list: metrics=\['auc'\]"),
        ({"loss": largest}, "A metric is called 'loss'"),
    ],
)
def test_what_is_no_metric_is_said(tmp_path: Path, model: nn.Module, rows: Any, given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        train(model, rows, tmp_path / "run", metrics=given, holdout=0.2)
    assert not (tmp_path / "run").exists()


def test_a_keras_model_has_the_same_figures(tmp_path: Path, rows: Any) -> None:
    keras = kerasmodel.library()
    made = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, activation="sigmoid")])
    made.compile("adam", "binary_crossentropy")
    result = pg.train(
        made,
        rows,
        validation=rows,
        engine=pg.Local(workers=2),
        run=pg.Run(out=tmp_path / "run"),
        metrics=["auc", "f1", largest],
    )
    found = pg.load(result.directory).evaluate(rows)
    assert result.metrics["auc"] == pytest.approx(found["auc"])
    assert result.metrics["f1"] == pytest.approx(found["f1"])
    assert result.metrics["largest"] == pytest.approx(float(result.model(rows[0]).detach().max()), rel=1e-5)


OWN = """
import torch

def focal(output, target):
    logp = output.log_softmax(1).gather(1, target[:, None])[:, 0]
    return -(((1 - logp.exp()) ** 2) * logp).mean()

def huber(output, target):
    return torch.nn.functional.huber_loss(output, target)

def largest(output, target):
    return output.max()
"""


def invoke(*words: str) -> str:
    found = CliRunner().invoke(app, list(words))
    assert found.exit_code == 0, found.output
    return found.output


def test_losses_and_metrics_of_a_file_are_named_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    data, run = write(tmp_path / "rows.csv"), str(tmp_path / "run")
    columns = ("--data", data, "--features", "a,b,c", "--label", "kind")
    small = ("--engine", "vector", "--workers", "2", "--epochs", "2", "--out", run)
    own = ("--loss", "mine.py:focal", "--metric", "auc", "--metric", "mine.py:largest", "--positive", "gamma")
    shown = invoke("train", *columns, *own, *small)
    assert "auc" in shown
    assert "largest" in shown
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    loaded = pg.load(run)
    found = loaded.evaluate()
    assert found["loss"] == pytest.approx(summary["test_loss"])
    assert {name: found[name] for name in ("auc", "f1")} == pytest.approx(
        {name: summary["metrics"][name] for name in ("auc", "f1")}
    )
    printed = json.loads(invoke("evaluate", run, "--json", "--metric", "mine.py:largest").splitlines()[-1])
    assert printed["f1"] == found["f1"]
    assert printed["positive"] == "gamma"
    assert printed["largest"] == pytest.approx(summary["metrics"]["largest"])
    assert "F1 of gamma" in invoke("evaluate", run)
    assert "F1 of hadron" in invoke("evaluate", run, "--positive", "hadron")
    (tmp_path / "mine.py").unlink()
    assert "loss" not in pg.load(run).evaluate()


def test_a_loss_of_numbers_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    columns = ("--data", write(tmp_path / "rows.csv"), "--features", "a,b,c", "--label", "mass")
    run = str(tmp_path / "run")
    invoke("train", *columns, "--loss", "mine.py:huber", "--metric", "mae", "--engine", "vector", "--out", run, "--quiet")
    assert pg.load(run).evaluate()["mae"] == pytest.approx(
        json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]["mae"]
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--loss", "mine.py:hubr"), "Unknown function in mine.py: 'hubr'. Did you mean 'huber'?"),
        (("--loss", "other.py:huber"), "there is no file"),
        (("--loss", "hubre"), "Unknown loss 'hubre'. Did you mean 'huber'?"),
        (("--metric", "acu"), "Unknown metric 'acu'. Did you mean 'auc'?"),
        (("--positive", "gama"), "Unknown class 'gama'. Did you mean 'gamma'?"),
    ],
)
def test_unknown_losses_metrics_and_classes_are_said_in_a_line(tmp_path: Path, words: tuple[str, str], said: str) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    columns = ("--data", write(tmp_path / "rows.csv"), "--features", "a,b,c", "--label", "kind")
    found = CliRunner().invoke(app, ["train", *columns, *words, "--engine", "vector"])
    assert found.exit_code
    assert said in str(found.exception) + found.output
