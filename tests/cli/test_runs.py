"""``paragrad runs``: what became of each run, from whatever its directory holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import paragrad as pg
from paragrad.cli.main import app
from paragrad.errors import UsageError
from paragrad.rundir import claim, runs
from paragrad.rundir.record import Record
from paragrad.types import Event

START = {"scheme": "agn:window=5", "engine": "local:workers=2", "workers": 2, "rows": 640, "epochs": 4}
COMMITS = [Event("commit", k / 4, {"clock": k, "loss": 1 / k, "rows": 64, "epoch": 0.1 * k}) for k in (1, 2, 3)]
LOOK = Event("validation", 0.6, {"clock": 2, "loss": 0.5, "accuracy": 0.75})
SUMMARY = {
    "samples": 2560, "epochs": 4, "test_accuracy": 0.9, "test_loss": 0.25, "train_loss": 0.2, "samples_per_second": 1000.0,
    "seconds": 2.56,
}  # fmt: skip


def make(path: Path, *events: Event, summary: dict[str, Any] | None = None, open_: bool = False) -> Record:
    path.mkdir(parents=True)
    (path / "run.toml").write_text("epochs = 8\n")
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    record = Record(path / "record.jsonl")
    for event in (Event("start", 0.0, START), *events):
        record.write(event)
    record.flush()
    if not open_:
        record.close()
    return record


def listed(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["runs", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def end(reason: str, **more: Any) -> Event:
    return Event("end", 2.56, {"reason": reason, **more})


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("finished", "finished"),
        ("target", "stopped (target)"),
        ("interrupted", "interrupted"),
        ("ended at once", "interrupted"),
        ("Diverged", "diverged"),
        ("WorkerError", "failed (WorkerError)"),
        ("not written", "failed (not written)"),
    ],
)
def test_the_status_is_the_reason_of_the_end(tmp_path: Path, reason: str, status: str) -> None:
    # A line may follow the end, such as that the record is written again.
    make(tmp_path / "run", *COMMITS, end(reason), Event("note", 3.0, {"message": "more"}))
    assert runs.look(tmp_path / "run").status == status


def test_a_finished_run_shows_its_summary(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "one", *COMMITS, LOOK, end("finished", summary=SUMMARY), summary=SUMMARY)
    (one,) = json.loads(listed("--json"))
    assert (one["status"], one["epochs_done"], one["epochs"], one["accuracy"], one["loss"]) == ("finished", 4.0, 4, 0.9, 0.25)
    row = next(line for line in listed().splitlines() if " one " in line).split()
    for cell in ("finished", "agn:window=5", "4/4", "0.9000", "0.2500", "1,000", "2.56"):
        assert cell in row


def test_an_unfinished_run_shows_its_last_commit_and_validation(tmp_path: Path) -> None:
    make(tmp_path / "run", *COMMITS[:2], LOOK, COMMITS[2])
    found = runs.look(tmp_path / "run")
    assert found.status == "unfinished"
    assert (found.epochs_done, found.epochs, found.accuracy, found.loss) == (0.3, 8, 0.75, 0.5)
    assert found.seconds == 0.75
    assert found.samples_per_second == pytest.approx(0.3 * 640 / 0.75)


def test_a_resumed_run_is_not_taken_for_the_finished_one_that_it_was(tmp_path: Path) -> None:
    again = (Event("start", 2.56, START), Event("resume", 2.56, {"clock": 3}))
    make(tmp_path / "run", *COMMITS, end("finished", summary=SUMMARY), *again, summary=SUMMARY)
    found = runs.look(tmp_path / "run")
    assert (found.status, found.accuracy) == ("unfinished", None)


def test_a_run_is_running_while_its_record_is_open_even_when_it_is_read(tmp_path: Path) -> None:
    record = make(tmp_path / "run", *COMMITS, open_=True)
    for _ in range(2):
        (tmp_path / "run" / "record.jsonl").read_bytes()
        assert runs.look(tmp_path / "run").status == "running"
    assert "running (written" in listed(tmp_path)
    record.close()
    assert runs.look(tmp_path / "run").status == "unfinished"
    assert "paragrad train --resume RUN" in listed(tmp_path)


def test_a_killed_process_gives_up_its_claim(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    program = (
        f"from paragrad.rundir import claim; f = open({str(path)!r}, 'ab'); claim.claim(f.fileno()); print(flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        assert claim.is_claimed(path)
        process.kill()
        process.wait()
        assert not claim.is_claimed(path)


def test_a_run_says_that_it_runs_and_then_that_it_is_done(tmp_path: Path, rows: Any, model: Any) -> None:
    seen = []

    def look(event: Event) -> None:
        if event.kind in ("go", "commit"):
            seen.append(runs.look(tmp_path / "run").status)

    run = pg.Run(out=str(tmp_path / "run"), callbacks=[look])
    pg.train(model, rows, scheme=pg.SyncSGD(), engine=pg.Vector(workers=2), batch_size=100, run=run)
    assert set(seen) == {"running"}
    found = runs.look(tmp_path / "run")
    assert (found.status, found.epochs_done) == ("finished", 1.0)


def test_runs_are_listed_oldest_first_and_foreign_directories_are_not(tmp_path: Path) -> None:
    for age, name in enumerate(("young", "middle", "old")):
        make(tmp_path / name, *COMMITS, end("finished"))
        os.utime(tmp_path / name / "run.toml", (1e9 - age, 1e9 - age))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").touch()
    (tmp_path / "file").touch()
    assert [Path(run["run"]).name for run in json.loads(listed(tmp_path, "--json"))] == ["old", "middle", "young"]
    assert "No run in" in listed(tmp_path / "foreign")
    assert str(tmp_path / "old") in listed(tmp_path / "old")
    with pytest.raises(UsageError, match="There is no directory"):
        runs.found(tmp_path / "nowhere")


def test_an_end_longer_than_the_tail_is_found(tmp_path: Path) -> None:
    histogram = {str(k): k for k in range(20_000)}
    make(tmp_path / "run", *COMMITS, end("finished", summary={**SUMMARY, "staleness": {"histogram": histogram}}))
    assert runs.look(tmp_path / "run").status == "finished"


def test_damaged_runs_are_listed_as_such(tmp_path: Path) -> None:
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "run.toml").touch()
    assert runs.look(tmp_path / "young").status == "damaged (no record.jsonl)"
    (tmp_path / "young" / "record.jsonl").write_bytes(b"\xff\x00nothing\n")
    assert runs.look(tmp_path / "young").status.startswith("damaged (its record")


DAMAGE = st.sampled_from(
    [b"\xff", b"[]", b"{}", b"null", b'{"event":"commit","epoch":[]}', b'{"event":"end","summary":[]}', b'"\n']
)


@given(st.lists(DAMAGE, max_size=6), st.binary(max_size=20), st.binary(max_size=20))
def test_whatever_a_run_directory_holds_it_is_listed(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], summary: bytes, settings: bytes
) -> None:
    path = tmp_path_factory.mktemp("runs") / "run"
    path.mkdir()
    first = json.dumps({"event": "start", "time": 0.0, **START}).encode()
    (path / "record.jsonl").write_bytes(b"\n".join([first, *lines]))
    (path / "summary.json").write_bytes(summary)
    (path / "run.toml").write_bytes(settings)
    assert len(runs.found(path.parent)) == 1
    listed(path.parent)


def test_a_long_record_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "run", end("finished", summary=SUMMARY))
    path = tmp_path / "run" / "record.jsonl"
    first, last = path.read_bytes().splitlines(keepends=True)
    with path.open("wb") as file:
        file.write(first)
        file.truncate(1 << 40)  # a hole of a terabyte: whoever reads it whole does not come back
        file.seek(1 << 40)
        file.write(b"\n" + last)
    assert runs.look(tmp_path / "run").status == "finished"
