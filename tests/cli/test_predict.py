"""``paragrad predict``: what is read back is what the module says, and nothing half-written is left."""

from __future__ import annotations

import csv
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import paragrad as pg
from paragrad.cli import predict
from paragrad.cli.main import app
from paragrad.data.given import of_source
from paragrad.data.source import Arrays
from paragrad.errors import UsageError
from paragrad.evaluation import predictions
from paragrad.evaluation.card import Card
from paragrad.load import Trained
from paragrad.models import builtin
from tests.conftest import train


def said(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("predict")
    x = np.random.default_rng(0).normal(size=(900, 4)).astype(np.float32)
    y = np.arange(900) % 3
    np.savez(where / "three.npz", x_train=x, y_train=y)
    model = builtin.build("mlp:8", (4,), 3)
    settings: dict[str, Any] = {"engine": pg.Vector(workers=2), "epochs": 1, "batch_size": 50, "holdout": 0.2}
    return train(model, str(where / "three.npz"), where / "run", **settings).directory


def read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    if path.suffix == ".npy":
        found = np.load(path)
        return {name: found[name] for name in found.dtype.names}
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return {name: column.to_numpy() for name, column in zip(*_columns(pyarrow.parquet.read_table(path)), strict=True)}
    with path.open(newline="") as file:
        lines = list(csv.reader(file))
    return {name: np.array(values) for name, values in zip(lines[0], zip(*lines[1:], strict=True), strict=True)}


def _columns(table: Any) -> tuple[Any, Any]:
    return table.column_names, table.columns


@pytest.mark.parametrize("suffix", [".csv", ".npy", ".parquet"])
@pytest.mark.parametrize("gathered", [100, 65_536])
def test_predictions_read_back_are_the_modules_own(run, tmp_path, suffix, gathered, monkeypatch):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(predictions, "GATHERED", gathered)
    data = run.parent / "three.npz"
    shown = said("predict", str(run), "--data", str(data), "--out", str(tmp_path / f"out{suffix}"))
    assert "900 rows (three.npz)" in shown
    found = read(tmp_path / f"out{suffix}")
    assert list(found) == ["row", "prediction", "p_0", "p_1", "p_2", "label"]
    with np.load(data) as held:
        x, y = held["x_train"], held["y_train"]
    with torch.no_grad():
        expected = torch.cat([pg.load(run).module(part).softmax(1) for part in torch.from_numpy(x).split(512)]).numpy()
    for kind in range(3):
        np.testing.assert_array_equal(found[f"p_{kind}"].astype(np.float32), expected[:, kind])
    np.testing.assert_array_equal(found["row"].astype(int), np.arange(900))
    np.testing.assert_array_equal(found["prediction"].astype(int), expected.argmax(1))
    np.testing.assert_array_equal(found["label"].astype(int), y)
    assert [path.name for path in tmp_path.iterdir()] == [f"out{suffix}"]


def test_by_default_the_rows_that_were_held_out(run, tmp_path):
    assert "the validation rows of" in said("predict", str(run), "--out", str(tmp_path / "held.npy"))
    assert len(np.load(tmp_path / "held.npy")) == 180
    assert said("predict", str(run), "--out", str(tmp_path / "quiet.npy"), "--quiet") == ""


def columns(head: Any, output: torch.Tensor, target: Any = None, classes: Any = None) -> dict[str, Any]:
    """The columns that a model makes which puts out just this."""
    card = Card("Linear", None, ((),), False, head, None, classes, None)
    known = Trained(Echo(output), None, classes, Path("run"), None, head, card)
    tree = torch.arange(len(output)) if target is None else (torch.arange(len(output)), target)
    return next(predict.columns(known, of_source(Arrays(tree), "rows")))


class Echo(nn.Module):
    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.output[rows]


def test_classes_have_their_names_in_the_headings():
    made = columns("softmax", torch.tensor([[5.0, 0], [0, 5]]), torch.tensor([0, 0]), ("background", "signal"))
    assert list(made) == ["row", "prediction", "p_background", "p_signal", "label"]
    assert made["prediction"].tolist() == ["background", "signal"]
    assert made["label"].tolist() == ["background", "background"]


def test_yes_or_no_has_one_score():
    made = columns("sigmoid", torch.tensor([[3.0], [-3.0]]))
    assert list(made) == ["row", "prediction", "score"]
    assert made["prediction"].tolist() == [1, 0]
    assert made["score"] == pytest.approx([0.9526, 0.0474], abs=1e-4)


def test_numbers_and_several_of_them():
    assert columns("numbers", torch.tensor([[3.0], [4.0]]), torch.tensor([3.5, 4.5])).keys() == {"row", "prediction", "label"}
    made = columns("numbers", torch.ones(2, 2), torch.zeros(2, 2))
    assert list(made) == ["row", "prediction_0", "prediction_1", "label_0", "label_1"]
    assert list(columns("scores", torch.ones(2, 2))) == ["row", "prediction", "score_0", "score_1"]
    assert list(columns("sigmoid", torch.ones(2, 2))) == ["row", "prediction_0", "score_0", "prediction_1", "score_1"]
    with pytest.raises(UsageError, match="does not fit a table"):
        columns("numbers", torch.ones(2, 2, 2))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--out", "there.csv"), ("there.csv already exists", "--force")),
        (("--out", "preds.xls"), ("'.xls'", ".parquet, .csv, .npy")),
        (("--out", "preds"), ("ends in 'nothing'",)),
        (("--out", "nowhere/preds.csv"), ("no directory 'nowhere'",)),
        (("--out", "folder.csv"), ("is a directory",)),
        (("--out", "new.csv", "--data", "digits"), ("A row has the shape (64,)",)),
    ],
)
def test_bad_usage_is_explained_and_nothing_is_left(run, tmp_path, monkeypatch, arguments, parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.csv").write_text("mine")
    (tmp_path / "folder.csv").mkdir()
    shown = said("predict", str(run), *arguments, code=2)
    for part in parts:
        assert part in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.csv", "there.csv"]
    assert (tmp_path / "there.csv").read_text() == "mine"


def test_force_replaces_the_file(run, tmp_path):
    (tmp_path / "there.csv").write_text("mine")
    said("predict", str(run), "--out", str(tmp_path / "there.csv"), "--force")
    assert (tmp_path / "there.csv").read_text().startswith("row,prediction")


@pytest.mark.parametrize("suffix", [".csv", ".npy", ".parquet"])
def test_rows_that_fail_midway_leave_nothing(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")

    def pieces() -> Any:
        yield {"row": np.arange(100_000)}
        raise UsageError("row 100,001 is bad")

    with pytest.raises(UsageError, match="is bad"):
        predictions.write(tmp_path / f"out{suffix}", pieces(), 200_000)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(UsageError, match=r"out.csv cannot be written \(File too large\): free disk space"):
            predictions.write(tmp_path / "out.csv", iter([{"row": np.arange(100_000)}]), 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
