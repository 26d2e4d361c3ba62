"""A disk that is full costs neither the training nor a checkpoint. A limit on the size of files stands for it."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

import paragrad as pg
from paragrad.rundir import checkpoint, record
from paragrad.rundir.record import Record, batches_used, read
from paragrad.types import Event
from tests.conftest import Watch, every_batch_once, train

TOTAL = 50 * 4
NO_ROOM = "File too large"
"""What the kernel says above such a limit: partial writes and errors come as they do from a full disk."""


def makes_room_again(test: Callable[..., None]) -> Callable[..., None]:
    """Before the test is reported on, and not in a fixture's end, which comes after: the report may go to a file as well."""

    @wraps(test)
    def tried(*arguments: Any, **named: Any) -> None:
        try:
            test(*arguments, **named)
        finally:
            allow(None)

    return tried


def allow(size: int | None) -> None:
    """Let no file grow beyond this size."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def fill_at_the_record(directory: Path, more: int = 50) -> Callable[[Watch, pg.Event], None]:
    """The record is the largest file of such a run: it alone finds no more room, in the middle of a line."""
    return lambda watch, event: allow((directory / "record.jsonl").stat().st_size + more)


FAT = 4 << 20


def fat_record(directory: Path) -> None:
    """A run that has begun, with a record that a limit of ``FAT`` does not let grow; all else of a small run fits."""
    directory.mkdir()
    line = '{"event":"note","time":0,"message":"' + "x" * (FAT - 60) + '"}\n'
    (directory / "record.jsonl").write_text(line)


def messages(watch: Watch, kind: str) -> list[str]:
    return [event.data["message"] for event in watch.events if event.kind == kind]


def commit(clock: int) -> Event:
    return Event("commit", float(clock), {"clock": clock, "batches": [clock]})


# -- the record -----------------------------------------------------------------------------------------------


@makes_room_again
def test_the_record_goes_on_in_the_middle_of_a_line_when_there_is_room_again(tmp_path):
    written = Record(tmp_path / "record.jsonl")
    allow(100)
    for clock in range(10):
        written.write(commit(clock))
    written.flush()
    assert NO_ROOM in str(written.error)
    assert os.path.getsize(tmp_path / "record.jsonl") == 100
    assert [event.data["clock"] for event in read(tmp_path / "record.jsonl")] == [0]
    allow(None)
    written.write(commit(10))
    written.close()
    assert written.error is None
    assert [event.data["clock"] for event in read(tmp_path / "record.jsonl")] == list(range(11))


@makes_room_again
def test_lines_beyond_what_is_held_are_left_out_and_the_record_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "HELD", 300)
    monkeypatch.setattr(record, "TOGETHER", 1)
    written = Record(tmp_path / "record.jsonl")
    allow(100)
    for clock in range(50):
        written.write(commit(clock))
    written.flush()
    allow(None)
    written.write(Event("note", 50.0, {"message": "room"}))
    for clock in range(51, 54):
        written.write(commit(clock))
    written.close()
    events = list(read(tmp_path / "record.jsonl"))
    gap = next(event for event in events if event.kind == "gap")
    clocks = [event.data["clock"] for event in events if event.kind == "commit"]
    assert clocks == [*range(51 - gap.data["lines"]), 51, 52, 53]
    assert gap.data["lines"] > 30


@makes_room_again
def test_a_last_line_that_found_no_room_is_cut_off_before_more_is_written(tmp_path):
    for clock in range(2):
        written = Record(tmp_path / "record.jsonl")
        allow(os.path.getsize(tmp_path / "record.jsonl") + 70)
        written.write(commit(clock))
        written.write(commit(99))
        written.close()
        allow(None)
    assert [event.data["clock"] for event in read(tmp_path / "record.jsonl")] == [0, 1]


# -- a run ----------------------------------------------------------------------------------------------------


@makes_room_again
def test_a_run_whose_record_finds_no_room_says_so_once_and_goes_on(model, rows, tmp_path):
    out = tmp_path / "run"
    watch = Watch(at=150, act=fill_at_the_record(out))
    result = train(model, rows, out, watch, scheme=pg.Downpour(), holdout=0.2, epochs=8, run={"checkpoint_every": 0.02})
    allow(None)
    assert result.stopped == "finished"
    (warning,) = messages(watch, "warning")
    assert warning.startswith("The record could not be written (")
    assert NO_ROOM in warning
    assert "Training continues without it" in warning
    assert json.loads((out / "summary.json").read_text())["samples"] == 320 * 8
    assert (out / "model.safetensors").exists()
    found, passed = checkpoint.newest(out / "checkpoints")
    assert found is not None
    assert not passed
    assert found.numbers["clock"] == result.summary["commits"], "checkpoints were written to the end"
    assert sum(event.kind == "commit" for event in read(out / "record.jsonl")) < result.summary["commits"]


@makes_room_again
def test_a_run_whose_record_finds_room_again_has_it_whole(model, rows, tmp_path):
    out = tmp_path / "run"
    fill = fill_at_the_record(out)

    def act(watch: Watch, event: pg.Event) -> None:
        fill(watch, event)
        watch.at, watch.act = 180, lambda watch, event: allow(None)

    watch = Watch(at=100, act=act)
    result = train(model, rows, out, watch, scheme=pg.Downpour(), run={"checkpoint_every": 0.01})
    assert len(messages(watch, "warning")) == 1
    assert messages(watch, "note")[-1] == "The record is written again."
    assert every_batch_once(result.directory, TOTAL)


@makes_room_again
def test_a_run_that_lost_lines_of_its_record_is_resumed_from_its_newest_checkpoint(model, rows, tmp_path):
    out = tmp_path / "run"

    class Cut(BaseException):
        pass

    fill = fill_at_the_record(out)

    def cut(watch: Watch, event: pg.Event) -> None:
        raise Cut

    def act(watch: Watch, event: pg.Event) -> None:
        fill(watch, event)
        watch.at, watch.act = 170, cut

    with pytest.raises(Cut):
        train(model, rows, out, Watch(at=80, act=act), scheme=pg.Downpour(), run={"checkpoint_every": 0.005})
    allow(None)
    last = max(event.data["clock"] for event in read(out / "record.jsonl") if event.kind == "commit")
    found, _ = checkpoint.newest(out / "checkpoints")
    assert found is not None
    assert found.numbers["clock"] > last, "the checkpoint knows of commits that the record lost"
    result = train(model, rows, out, scheme=pg.Downpour(), run={"resume": True})
    assert result.summary["samples"] == 400 * 4
    used = batches_used(read(out / "record.jsonl"))
    assert max(used.values()) == 1
    assert len(used) == TOTAL - (found.numbers["clock"] - last)


@makes_room_again
def test_a_checkpoint_that_finds_no_room_is_not_taken_for_written(model, rows, tmp_path, capfd):
    out = tmp_path / "run"
    watch = Watch(at=100, act=lambda watch, event: allow(500))
    with pytest.raises(pg.NotWritten):
        train(model, rows, out, watch, scheme=pg.Downpour(), run={"checkpoint_every": 0.01})
    allow(None)
    warnings = messages(watch, "warning")
    assert any(re.match(r"Checkpoint \d+ could not be written .*; the one before it is kept", each) for each in warnings)
    kept = {path.name for path in (out / "checkpoints").iterdir()}
    said = [event.data["path"].split("/")[1] for event in watch.events if event.kind == "checkpoint"]
    assert kept == set(said[-2:])
    assert "Traceback" not in capfd.readouterr().err


@makes_room_again
def test_a_model_that_finds_no_room_is_an_error_that_holds_it_and_the_run_can_be_finished(model, rows, tmp_path):
    out = tmp_path / "run"

    def last(event: pg.Event) -> None:
        if event.kind == "validation":
            allow(500)

    run = {"validate_every": None, "checkpoint_every": None}
    settings = {"scheme": pg.SyncSGD(), "holdout": 0.2, "epochs": 2}
    with pytest.raises(pg.NotWritten, match=rf"{NO_ROOM}.*Make room.*has a checkpoint.*resume=True") as stop:
        train(model, rows, out, last, run=run, **settings)  # type: ignore[arg-type]
    allow(None)
    assert not (out / "summary.json").exists()
    assert {path.name for path in out.iterdir()} == {"run.toml", "model.json", "record.jsonl", "checkpoints", "logs"}
    finished = train(model, rows, out, run=run | {"resume": True}, **settings)
    for mine, theirs in zip(finished.model.parameters(), stop.value.result.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert (out / "model.safetensors").exists()
    assert finished.summary["samples"] == 320 * 2


@makes_room_again
def test_without_a_callback_the_warning_goes_to_stderr(model, rows, tmp_path, capfd):
    fat_record(tmp_path / "run")
    allow(FAT)
    train(model, rows, tmp_path / "run", scheme=pg.Downpour(), epochs=1, run={"resume": "auto"})
    assert capfd.readouterr().err.count("WARNING: The record could not be written") == 1


@makes_room_again
def test_a_disk_that_is_full_at_the_start_is_refused_and_run_toml_stays(model, rows, tmp_path):
    out = tmp_path / "run"
    train(model, rows, out, scheme=pg.AGN(window=3), epochs=1)
    before = (out / "run.toml").read_text()
    allow(20)
    with pytest.raises(pg.UsageError, match=f"cannot be written to \\({NO_ROOM}\\); make room"):
        train(model, rows, out, scheme=pg.AGN(window=3), epochs=2, run={"resume": True})
    assert (out / "run.toml").read_text() == before


# -- the command ----------------------------------------------------------------------------------------------

COMMAND = """
import resource
from paragrad.cli.main import main
from paragrad.rundir.directory import RunDirectory

def allow(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

def save_model(self, learner, real=RunDirectory.save_model):
    allow(500)
    real(self, learner)
"""


def paragrad(setting: str, out: str) -> subprocess.CompletedProcess[str]:
    options = ["--data", "digits", "--model", "linear", "--workers", "2", "--resume", "auto", "--out", out]
    command = [sys.executable, "-c", f"{COMMAND}\n{setting}\nmain()", "train", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@makes_room_again
def test_the_command_shows_the_warning_and_ends_well():
    fat_record(Path("run"))
    done = paragrad(f"allow({FAT})", "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WARNING: The record could not be written") == 1
    assert Path("run/summary.json").exists()


@makes_room_again
def test_the_command_ends_with_status_1_when_the_model_finds_no_room():
    failed = paragrad("RunDirectory.save_model = save_model", "run")
    assert failed.returncode == 1, failed.stdout
    assert failed.stderr.startswith("error: The training is done, but the model or its summary could not be written to run (")
    assert "--resume run" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert checkpoint.newest(Path("run/checkpoints"))[0] is not None
