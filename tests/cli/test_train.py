"""``paragrad train`` as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paragrad.cli.main import app
from paragrad.cli.train import DEFAULTS, gather
from paragrad.errors import UsageError
from tests.engines.test_local_life import wait_for

TINY = ("--data", "digits", "--model", "linear", "--workers", "2", "--batch-size", "64")


def paragrad(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from paragrad.cli.main import main; main()", *arguments]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=60, check=False)


def summary(directory: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return read


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "record.jsonl").read_text().splitlines()]


def rows(directory: Path) -> int:
    """How many there were to train on."""
    return int(json.loads((directory / "record.jsonl").read_text().splitlines()[0])["rows"])


def within(where: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    """The same in this process, which has torch loaded already."""
    monkeypatch.chdir(where)
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run that the other tests repeat and go on with."""
    where = tmp_path_factory.mktemp("cli")
    flags = (
        "--scheme",
        "agn:window=3",
        "--optimizer",
        "adam:lr=0.01",
        "--seed",
        "3",
        "--holdout",
        "0.25",
        "--out",
        "runs/first",
    )
    return where, paragrad(where, "train", *TINY, *flags)


def test_a_run_does_what_was_asked(first: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    where, done = first
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for part in ("held out", "agn:window=3", "mean staleness", "Run directory: runs/first"):
        assert part in done.stdout
    found = summary(where / "runs/first")
    assert found["scheme"] == "agn:window=3"
    assert found["workers"] == 2
    assert found["samples"] == rows(where / "runs/first") == pytest.approx(0.75 * 1797, abs=1)


def test_run_toml_says_what_the_flags_said(first: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    where, _ = first
    config = tomllib.loads((where / "runs/first/run.toml").read_text())
    asked = {"data": "digits", "model": "linear", "scheme": "agn:window=3", "optimizer": "adam:lr=0.01", "batch_size": 64}
    assert config.items() >= (asked | {"seed": 3, "epochs": 1, "holdout": 0.25}).items()


def test_its_run_toml_repeats_a_run_and_flags_override_it(
    first: tuple[Path, subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, _ = first
    flags = ("--workers", "1", "--epochs", "2", "--out", "runs/again", "--quiet")
    done = within(where, monkeypatch, "train", "runs/first/run.toml", *flags)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    before, after = summary(where / "runs/first"), summary(where / "runs/again")
    assert after["workers"] == 1
    assert after["samples"] == 2 * before["samples"]
    for key in ("scheme", "seed", "batch_size", "parameters"):
        assert after[key] == before[key]


def test_a_run_goes_on_for_more_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = within(tmp_path, monkeypatch, "train", *TINY, "--out", "runs/short", "--quiet")
    assert begun.exit_code == 0, begun.stderr
    done = within(tmp_path, monkeypatch, "train", "--resume", "runs/short", "--epochs", "2")
    assert done.exit_code == 0, done.stderr
    found = summary(tmp_path / "runs/short")
    assert found["epochs"] == 2
    assert found["samples"] == 2 * rows(tmp_path / "runs/short")


def test_a_run_that_has_fewer_epochs_than_it_has_behind_it_trains_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = within(tmp_path, monkeypatch, "train", *TINY, "--epochs", "2", "--out", "runs/long", "--quiet")
    assert begun.exit_code == 0, begun.stderr
    before = summary(tmp_path / "runs/long")
    done = within(tmp_path, monkeypatch, "train", "--resume", "runs/long", "--epochs", "1")
    assert done.exit_code == 0, done.stderr
    assert "The run has already trained 2 epochs, and epochs=1: nothing is left to train. Give epochs above 2" in done.stdout
    assert "Nothing was trained: finished." in done.stdout
    assert "samples/s" not in done.stdout, "no old figures as if they were new"
    assert summary(tmp_path / "runs/long")["samples"] == before["samples"]


def test_ctrl_c_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from paragrad.cli.main import main; main()", "train", *TINY]
    options = ("--epochs", "100000", "--out", "runs/long", "--validate-every", "none")
    pipe = subprocess.PIPE
    process = subprocess.Popen([*command, *options], cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
    record = tmp_path / "runs/long/record.jsonl"
    wait_for(lambda: record.exists() and '"commit"' in record.read_text(), process, seconds=120)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "error" not in out + err
    assert re.search(
        r"The run was stopped at update \d+ and has a checkpoint. To go on: paragrad train --resume runs/long$", err
    )


def test_ctrl_c_before_the_run_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paragrad.cli.train.carry_out", interrupted)
    done = within(tmp_path, monkeypatch, "train", *TINY)
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "Interrupted before the run began.\n")


def test_a_worker_that_raises_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "class Moody(torch.nn.Linear):\n"
        "    def __init__(self, inputs, outputs):\n"
        "        super().__init__(inputs[0], outputs)\n"
        "    def forward(self, x):\n"
        "        if self.training:\n"
        "            raise RuntimeError('not today')\n"
        "        return super().forward(x)\n"
    )
    done = paragrad(tmp_path, "train", "--data", "digits", "--model", "model.py:Moody", "--workers", "2")
    assert done.returncode == 1
    assert "Worker" in done.stderr
    assert "RuntimeError: not today" in done.stderr
    assert "cli/main.py" not in done.stderr, "the worker's traceback, not ours"


def test_a_run_that_diverges_exits_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = within(tmp_path, monkeypatch, "train", *TINY, "--optimizer", "sgd:lr=1e38", "--epochs", "20")
    assert done.exit_code == 1, done.stdout
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error:")


def toml(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_when_to_validate_and_what_to_keep_are_options_and_in_run_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = ("--engine", "vector", "--optimizer", "adam:lr=0.1", "--epochs", "3", "--validate-every", "5", "--keep", "best")
    for arguments in ((*TINY, *how), ("runs/a/run.toml",)):
        out = "a" if arguments[0] == "--data" else "b"
        done = within(tmp_path, monkeypatch, "train", *arguments, "--out", f"runs/{out}")
        assert done.exit_code == 0, done.output
        assert "Kept the best weights, of epoch" in done.output
        clocks = [event["clock"] for event in events(tmp_path / "runs" / out) if event["event"] == "validation"]
        assert clocks[:4] == [0, 5, 10, 15]
        assert summary(tmp_path / "runs" / out)["kept"]["weights"] == "best"
    written = tomllib.loads((tmp_path / "runs" / "b" / "run.toml").read_text())
    assert (written["validate_every"], written["keep"]) == ("5", "best")


def test_flags_lie_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = toml(
        tmp_path / "mine.toml", 'data = "digits"\nepochs = 5\nscheme = "syncsgd"\nout = "there"\nvalidate_every = "none"'
    )
    settings, resume = gather(path, None, {"epochs": 7})
    assert resume is False
    assert settings == DEFAULTS | {"data": "digits", "epochs": 7, "scheme": "syncsgd", "out": "there", "validate_every": None}


def test_the_directory_of_a_past_run_is_not_taken_again(tmp_path: Path) -> None:
    path = toml(tmp_path / "run.toml", 'data = "digits"\nout = "there"')
    (tmp_path / "record.jsonl").touch()
    assert "out" not in gather(path, None, {})[0]


def test_the_engine_and_its_short_options_agree(tmp_path: Path) -> None:
    path = toml(tmp_path / "mine.toml", 'engine = "local:threads=1"\nworkers = 4')
    assert gather(path, None, {"workers": 8})[0]["workers"] == 8
    assert "workers" not in gather(path, None, {"engine": "local:workers=3"})[0]
    assert gather(path, None, {"engine": "local:threads=2"})[0]["workers"] == 4
    with pytest.raises(UsageError, match="twice"):
        gather(None, None, {"engine": "local:workers=3", "workers": 4})


def test_a_resumed_run_keeps_its_options_and_its_place(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    toml(run / "run.toml", 'data = "digits"\nepochs = 5\nseed = 9')
    settings, resume = gather(None, str(run), {"epochs": 8})
    assert resume is True
    assert settings["out"] == str(run)
    assert (settings["seed"], settings["epochs"]) == (9, 8)


def test_resume_auto_begins_where_there_is_nothing(tmp_path: Path) -> None:
    settings, resume = gather(None, "auto", {"data": "digits", "out": str(tmp_path / "new")})
    assert resume == "auto"
    assert settings["out"] == str(tmp_path / "new")
