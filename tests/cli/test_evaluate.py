"""``paragrad evaluate``: the figures of a run's own rows and of others, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paragrad.cli.evaluate import figure, show
from paragrad.cli.main import app
from paragrad.data.given import Given
from paragrad.load import load

TRAIN = ("--engine", "vector", "--model", "linear", "--workers", "2", "--batch-size", "64", "--scheme", "syncsgd", "--quiet")


def said(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "120"})
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("evaluate")
    said("train", "--data", "digits", *TRAIN, "--out", str(where / "digits"))
    return where / "digits"


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a file with a test part."""
    where = tmp_path_factory.mktemp("binary")
    x = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    np.savez(where / "two.npz", x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
    said(
        "train",
        "--data",
        str(where / "two.npz"),
        *TRAIN,
        "--epochs",
        "5",
        "--optimizer",
        "adam:lr=0.1",
        "--out",
        str(where / "run"),
    )
    return where / "run"


def test_by_default_the_rows_that_the_run_was_validated_on(run: Path) -> None:
    found = json.loads(said("evaluate", str(run), "--json"))
    summary = json.loads((run / "summary.json").read_text())
    assert found["loss"] == summary["test_loss"]
    assert found["accuracy"] == summary["test_accuracy"]
    assert found["rows"] == 360
    assert np.sum(found["confusion"]) == 360


def test_the_tables_hold_the_figures(run: Path, binary: Path) -> None:
    shown = said("evaluate", str(run))
    for part in ("the validation rows of", "ROC AUC", "F1 (mean over classes)", "log loss", "Confusion matrix"):
        assert part in shown
    summary = json.loads((run / "summary.json").read_text())
    assert f"{summary['test_accuracy']:.4f}" in shown
    other = said("evaluate", str(binary), "--data", str(binary.parent / "two.npz"))
    assert "two.npz" in other
    assert " F1 of " in other


def test_other_rows_by_data(binary: Path, tmp_path: Path) -> None:
    x = np.array([[5.0, 0, 0, 0], [-5.0, 0, 0, 0]])
    np.savez(tmp_path / "sure.npz", x_train=x, y_train=np.array([1, 0]))
    found = json.loads(said("evaluate", str(binary), "--data", str(tmp_path / "sure.npz"), "--json"))
    assert found["rows"] == 2
    assert found["accuracy"] == found["auc"] == 1.0


def test_a_significance_is_shown_where_there_is_one(binary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = {"cut": 0.83, "s": 100.0, "b": 2500.0, "ams": 1.99, "s_over_root_b": 2.0}
    found: dict[str, Any] = {"rows": 3, "accuracy": 0.5, "confusion": [[1.5, 0.5], [0.25, 2.0]], "significance": best}
    show(load(binary), Given(3, lambda size: iter(()), "rows", ("A note.",)), found)
    shown = capsys.readouterr().out
    for part in ("A note.", "AMS", "0.8300", "2,500.0", "1.9900"):
        assert part in shown
    assert figure(float("nan")) == "-"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("nowhere",), ("'nowhere' is not a run directory",)),
        (("{run}", "--data", "digit"), ("Unknown data set", "Did you mean 'digits'?")),
        (("{binary}", "--data", "digits"), ("A row has the shape (64,)", "trained on rows of (4,)")),
        (("{run}", "--checkpoint", "first"), ("'latest'",)),
    ],
)
def test_bad_usage_is_explained(run: Path, binary: Path, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    shown = said("evaluate", *(word.format(run=run, binary=binary) for word in arguments), code=2)
    for part in parts:
        assert part in shown
