"""Bad input on the command line: one message that names the value and the remedy, no traceback, exit 2, nothing lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from paragrad.cli.main import app


def paragrad(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def train(*arguments: str) -> Result:
    return paragrad("train", "--data", "digits", "--model", "linear", *arguments)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(result: Result, *named: str) -> None:
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    said = " ".join(result.stderr.split())
    for part in named:
        assert part in said
    assert not Path("runs").exists(), "a run that was refused leaves nothing behind"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--scheme", "agm"], ["'agm'", "Did you mean 'agn'?"]),
        (["--scheme", "agn:windw=5"], ["'windw'", "Did you mean 'window'?"]),
        (["--scheme", "agn:window=0"], ["window=0", "at least 1"]),
        (["--scheme", "agn:window=x"], ["window=x", "a whole number"]),
        (["--engine", "locale"], ["'locale'", "Did you mean 'local'?"]),
        (["--engine", "local:worker=2"], ["'worker'", "Did you mean 'workers'?"]),
        (["--engine", "local:workers=2", "--workers", "3"], ["workers", "twice"]),
        (["--cluster", "straggler"], ["cluster=straggler", "'local'", "give --engine vector"]),
        (["--model", "mpl"], ["'mpl'", "Did you mean 'mlp'?"]),
        (["--model", "mlp:10-x"], ["mlp:10-x", "whole numbers"]),
        (["--model", "nowhere.py:build"], ["nowhere.py", "no file"]),
        (["--optimizer", "adm"], ["'adm'", "Did you mean"]),
        (["--optimizer", "adam:rate=1"], ["'rate'", "lr"]),
        (["--optimizer", "adam:lr=-1"], ["-1"]),
        (["--optimizer", "cg", "--scheme", "syncsgd"], ["SyncSGD ships one gradient", "several points", "modelaveraging"]),
        (["--optimizer", "cg", "--schedule", "cosine"], ["ConjugateGradient has no learning rate"]),
        (["--optimizer", "cg", "--clip-norm", "1"], ["ConjugateGradient searches along a line", "leave clip_norm"]),
        (["--optimizer", "cg:beta=polak"], ["'polak'", "polak-ribiere"]),
        (["--schedule", "cosin"], ["Unknown schedule 'cosin'", "Did you mean 'cosine'?"]),
        (["--schedule", "cosine:warm=0.1"], ["'warm'", "Did you mean 'warmup'?"]),
        (["--schedule", "step:at=0.9+0.5"], ["0.9+0.5", "rising order"]),
        (["--clip-norm", "-1"], ["clip_norm=-1.0", "above 0"]),
        (["--clip-norm", "1", "--clip-value", "1"], ["clip_norm=1.0 and clip_value=1.0", "give one"]),
        (["--optimizer", "sparseadam"], ["SparseAdam", "Adam"]),
        (["--loss", "mes"], ["'mes'", "Did you mean 'mse'?"]),
        (["--workers", "0"], ["workers=0", "at least 1"]),
        (["--workers", "50", "--batch-size", "100"], ["50 workers", "at most"]),
        (["--threads", "0"], ["threads=0", "at least 1"]),
        (["--on-failure", "ignore"], ["ignore", "replace"]),
        (["--partition", "cut"], ["'cut'", "stolen"]),
        (["--epochs", "0"], ["epochs", "0"]),
        (["--batch-size", "0"], ["0"]),
        (["--holdout", "1.5"], ["1.5", "share"]),
        (["--max-seconds", "0"], ["0", "above 0"]),
        (["--patience", "0"], ["patience=0", "at least 1"]),
        (["--checkpoint-every", "0"], ["checkpoint_every", "above 0"]),
        (["--validate-every", "often"], ["validate_every='often'", "'epoch'", "'5s'"]),
        (["--validate-every", "5.0"], ["Did you mean '5s'?"]),
        (["--keep", "first"], ["keep='first'", "'best' or 'last'"]),
        (["--keep", "best", "--validate-every", "none"], ["keep='best' needs validation during the run"]),
        (["--resume", "nowhere"], ["nowhere", "run.toml"]),
        (["--resume", "auto"], ["--out"]),
        (["--resume", "a", "--out", "b"], ["--resume a", "'b'"]),
        (["nowhere.toml"], ["nowhere.toml", "no file"]),
    ],
)
def test_a_wrong_option_is_named_with_its_remedy(arguments: list[str], named: list[str]) -> None:
    refused(train(*arguments), *named)


@pytest.mark.parametrize(
    "arguments",
    [["--workers", "two"], ["--checkpoint-every", "often"], ["--worker", "2"], ["a.toml", "b.toml"]],
)
def test_what_typer_refuses_is_bad_usage_too(arguments: list[str]) -> None:
    refused(train(*arguments), *(arguments[:1] if arguments[0].startswith("--") else ["b.toml"]))


def test_no_data_is_asked_for() -> None:
    refused(paragrad("train", "--model", "mlp"), "--data")


@pytest.mark.parametrize("name", ["schemes", "engines"])
def test_an_unknown_page_is_named(name: str) -> None:
    refused(paragrad(name, "agm"), "'agm'")


def test_a_data_set_that_is_not_there_is_named() -> None:
    refused(paragrad("train", "--data", "digit"), "'digit'", "Did you mean 'digits'?")
    refused(paragrad("train", "--data", "gone.npz"), "gone.npz")


def test_a_file_cut_short_is_named(here: Path) -> None:
    np.savez(here / "rows.npz", x_train=np.zeros((100, 4), np.float32), y_train=np.zeros(100, np.int64))
    whole = (here / "rows.npz").read_bytes()
    (here / "rows.npz").write_bytes(whole[: len(whole) // 2])
    refused(paragrad("train", "--data", "rows.npz"), "rows.npz", "truncated")


def rows(here: Path, x: np.ndarray, y: np.ndarray) -> Result:
    np.savez(here / "rows.npz", x_train=x, y_train=y)
    return paragrad("train", "--data", "rows.npz", "--model", "linear", "--batch-size", "8")


def test_nan_in_the_data_is_named(here: Path) -> None:
    x = np.zeros((100, 4), np.float32)
    x[17, 2] = np.nan
    refused(rows(here, x, np.zeros(100, np.int64)), "NaN", "row 17")


def test_a_label_out_of_range_is_named(here: Path) -> None:
    y = np.arange(100) % 3
    y[5] = -1
    refused(rows(here, np.zeros((100, 4), np.float32), y), "label", "-1")


def test_rows_without_a_target_are_named(here: Path) -> None:
    refused(rows(here, np.zeros((100, 4), np.float32), np.zeros(99, np.int64)), "100", "99")


def test_a_used_run_directory_is_kept(here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "notes.txt").write_text("precious")
    refused(train("--out", "mine"), "mine", "already used")
    assert (here / "mine" / "notes.txt").read_text() == "precious"
    assert len(list((here / "mine").iterdir())) == 1


def test_an_unwritable_run_directory_is_named(here: Path) -> None:
    (here / "file").write_text("")
    refused(train("--out", "file"), "file")
    refused(train("--out", "file/run"), "file/run")


@pytest.mark.parametrize(
    ("text", "named"), [("epoch = 3", "Did you mean 'epochs'?"), ("epochs = 'x'", "a whole number"), ("=", "TOML")]
)
def test_a_wrong_run_toml_is_named(here: Path, text: str, named: str) -> None:
    (here / "run.toml").write_text(text)
    refused(paragrad("train", "run.toml"), "run.toml", named)


def test_what_was_made_in_python_cannot_be_repeated(here: Path) -> None:
    (here / "run.toml").write_text('data = "digits"\nmodel = "python:Sequential"')
    refused(paragrad("train", "run.toml"), "python:Sequential", "--model")


def test_sparse_gradients_are_refused(here: Path) -> None:
    (here / "model.py").write_text(
        "import torch\n"
        "class Bag(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(17, 10, sparse=True)\n"
        "    def forward(self, x):\n"
        "        return self.table((x * 16).long()).sum(1)\n"
    )
    refused(paragrad("train", "--data", "digits", "--model", "model.py:Bag"), "sparse")
