"""Files on the command line: what they hold, how their columns are named, and a run.toml that repeats the run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import paragrad as pg
from paragrad.cli.main import app
from paragrad.cli.train import lengths, names
from paragrad.config.options import read_config
from paragrad.data.source import leaves
from paragrad.errors import UsageError
from paragrad.jobs import recipe
from tests.data.test_table import NAMES, events
from tests.data.written import as_parquet, as_tree

QUICK = ("--model", "linear", "--scheme", "syncsgd", "--engine", "vector", "--workers", "2", "--batch-size", "8", "--quiet")


def paragrad(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})


def weights(directory: str) -> bytes:
    return (Path(directory) / "model.safetensors").read_bytes()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    told = events(120)
    jets = [np.arange(row % 3, dtype=np.float32) for row in range(120)]
    as_tree(tmp_path / "all.root", {**told, "jet": jets}, 50)
    as_parquet(tmp_path / "all.parquet", told, 50)
    for name, kind in (("sig", 1), ("bkg", 0)):
        mine = told["label"] == kind
        as_parquet(tmp_path / f"{name}.parquet", {key: values[mine] for key, values in told.items() if key != "label"}, 50)
    return told


def test_a_file_is_shown_with_its_columns(files: dict[str, Any]) -> None:
    done = paragrad("data", "all.root", "all.parquet")
    assert done.exit_code == 0
    for part in ("all.root: 120 rows", "jet", "float32, lists of different lengths", "label", "int64", "all.parquet: 120 rows"):
        assert part in done.output
    assert "does not exist" in paragrad("data", "gone.root").stderr


def test_a_run_from_files_is_repeated_by_its_run_toml(files: dict[str, Any]) -> None:
    flags = (
        "--features",
        "pt,eta,jet",
        "--label",
        "label",
        "--weight",
        "w",
        "--tree",
        "events",
        "--pad",
        "jet=2",
        "--no-stream",
    )
    begun = paragrad("train", "--data", "all.root", *flags, *QUICK, "--out", "runs/a")
    assert begun.exit_code == 0, begun.stderr
    config = tomllib.loads(Path("runs/a/run.toml").read_text())
    asked = {"data": "all.root", "features": ["pt", "eta", "jet"], "label": "label", "weight": "w", "tree": "events"}
    assert config.items() >= (asked | {"pad": {"jet": 2}, "stream": False}).items()
    again = paragrad("train", "runs/a/run.toml", "--quiet", "--out", "runs/b")
    assert again.exit_code == 0, again.stderr
    assert weights("runs/a") == weights("runs/b")
    assert Path("runs/b/run.toml").read_text() == Path("runs/a/run.toml").read_text()
    assert paragrad("replay", "runs/a").exit_code == 0


def test_the_class_comes_from_the_file(files: dict[str, Any]) -> None:
    done = paragrad("train", "--data", "signal=s*.parquet", "--data", "background=bkg.parquet", *QUICK, "--out", "runs/a")
    assert done.exit_code == 0, done.stderr
    assert tomllib.loads(Path("runs/a/run.toml").read_text())["data"] == ["signal=s*.parquet", "background=bkg.parquet"]
    assert paragrad("train", "runs/a/run.toml", "--quiet", "--out", "runs/b").exit_code == 0
    assert weights("runs/a") == weights("runs/b")


@pytest.mark.parametrize(
    "table",
    [
        pg.Table("all.parquet", features=NAMES, weight="w"),
        pg.Table(["sig.parquet", "bkg.parquet"], features=["pt"], label="eta"),
        pg.Table({"signal": ["sig.parquet"], "background": Path("bkg.parquet")}, weight="w", stream=False),
        pg.Table("all.root", features=["jet", "pt"], pad=3),
        pg.Table("all.root", features=["j*"], pad={"jet": 3}, tree="events"),
    ],
)
def test_a_table_made_in_python_is_written_down_so_that_it_can_be_made_again(table: pg.Table, files: dict[str, Any]) -> None:
    told = leaves(table.open().load())
    model = torch.nn.Linear(told[0].shape[1], 2 if table.label is None else 1)
    done = pg.train(model, table, engine=pg.Vector(workers=2), optimizer="sgd:lr=0.01", run=pg.Run(out="runs/a"))
    again = recipe.data_of(read_config(done.directory / "run.toml"))
    assert isinstance(again, pg.Table)
    assert all(torch.equal(one, other) for one, other in zip(told, leaves(again.open().load()), strict=True))


def test_what_stands_behind_the_options() -> None:
    assert names("a, b,jet_*") == ["a", "b", "jet_*"]
    assert lengths("4") == 4
    assert lengths("a=4, b=5") == {"a": 4, "b": 5}
    for wrong in ("four", "a=", "a=b", "=,"):
        with pytest.raises(typer.BadParameter):
            lengths(wrong)


def test_names_and_noise_are_no_tables() -> None:
    assert recipe.data_of({"data": "digits"}) == "digits"
    assert recipe.data_of({"data": ["noise:rows=10"]}) == "noise:rows=10"
    assert recipe.data_of({"data": "a.npz"}) == "a.npz"
    assert recipe.data_of({"data": "a.npz", "label": "y"}) == pg.Table("a.npz", label="y")
    with pytest.raises(UsageError, match="label describe the columns of a table, but data 'digits' is not a table"):
        recipe.data_of({"data": "digits", "label": "y"})
    with pytest.raises(UsageError, match="some name their class"):
        recipe.data_of({"data": ["signal=a.root", "b.root"]})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--data", "gone.root"], ["gone.root does not exist"]),
        (["--data", "*.csv"], ["No file matches '*.csv'"]),
        (["--data", "all.parquet", "--label", "lable"], ["'lable'", "Did you mean 'label'?"]),
        (["--data", "all.parquet", "--features", "pt,etta"], ["all.parquet", "'etta'", "Did you mean 'eta'?"]),
        (["--data", "all.parquet", "--weight", "wt"], ["'wt'", "Did you mean 'w'?"]),
        (["--data", "all.root"], ["'jet' of all.root holds lists of different lengths, the longest of 2", "--pad 2"]),
        (["--data", "all.root", "--tree", "event"], ["tree in all.root", "Did you mean 'events'?"]),
        (["--data", "all.root", "--pad", "x"], ["'x'", "neither a length"]),
        (["--data", "sig.parquet"], ["sig.parquet", "--label", "pt, eta, phi, w"]),
        (["--data", "sig.parquet", "--data", "a=bkg.parquet"], ["Name the class of each"]),
        (["--data", "a=sig.parquet", "--label", "pt"], ["label='pt'", "of each class"]),
    ],
)
def test_what_is_wrong_with_files_is_said_and_nothing_is_left_behind(
    arguments: list[str], named: list[str], files: dict[str, Any]
) -> None:
    done = paragrad("train", *arguments, "--model", "linear")
    assert done.exit_code == 2, done.output
    said = " ".join(done.stderr.split())
    for part in named:
        assert part in said
    assert not Path("runs").exists()


def test_rows_and_columns_are_chosen_and_validated_on_by_options(files: dict[str, Any]) -> None:
    told = events(60, seed=3)
    as_parquet(Path("test.parquet"), told, 25)
    flags = ("--data", "all.parquet", "--validation", "test.parquet", "--exclude", "w", "--select", "pt > 0 and eta < 1")
    done = paragrad("train", *flags, "--device", "cpu", *QUICK, "--out", "first")
    assert done.exit_code == 0, done.output
    config = read_config(Path("first") / "run.toml")
    assert (config["validation"], config["exclude"], config["select"]) == ("test.parquet", ["w"], "pt > 0 and eta < 1")
    parts = recipe.rows(config)
    for part, source in ((parts.train, files), (parts.validation, told)):
        assert len(part) == int(((source["pt"] > 0) & (source["eta"] < 1)).sum())
    assert paragrad("train", "first/run.toml", "--quiet", "--out", "second").exit_code == 0
    assert weights("first") == weights("second")
    judged = paragrad("evaluate", "first", "--json")
    assert judged.exit_code == 0, judged.output
    assert json.loads(judged.output)["rows"] == len(parts.validation)
    predicted = paragrad("predict", "first", "--data", "test.parquet", "--out", "p.csv")
    assert "select 'pt > 0 and eta < 1' of the training is not applied: every row gets a prediction." in predicted.output
    assert "Predictions for 60 rows" in predicted.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--select", "ptt > 0"), "Unknown column of all.parquet: 'ptt'. Did you mean 'pt'"),
        (("--select", "open('x')"), "may only contain comparisons"),
        (("--exclude", "ptt"), "to exclude: 'ptt'. Did you mean 'pt'"),
        (("--validation", "gone.parquet"), "gone.parquet does not exist"),
        (("--validation", "all.parquet", "--holdout", "0.1"), "are both given"),
        (("--device", "tpu"), "tpu"),
    ],
)
def test_a_choice_that_cannot_be_is_named(flags: tuple[str, ...], message: str, files: dict[str, Any]) -> None:
    done = paragrad("train", "--data", "all.parquet", *QUICK, *flags, "--out", "bad")
    assert done.exit_code == 2
    assert message in done.stderr
    assert not Path("bad").exists()
