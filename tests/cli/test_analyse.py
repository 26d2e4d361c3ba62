"""``paragrad analyse``: from the directory of a run to a table, the law of staleness, a comparison and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paragrad.cli.main import app
from paragrad.rundir.record import Record
from paragrad.types import Event


def analyse(*arguments: str | Path) -> Result:
    return CliRunner().invoke(
        app, ["analyse", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}
    )


def commit(worker: int, clock: int, version: int, **more: float) -> Event:
    facts = {"clock": clock, "worker": worker, "version": version, "staleness": clock - 1 - version, "incarnation": 0}
    return Event("commit", 0.1 * clock, {**facts, **more})


def make(path: Path, events: list[Event], summary: dict[str, object] | None = None) -> Path:
    path.mkdir()
    record = Record(path / "record.jsonl")
    for event in events:
        record.write(event)
    record.close()
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    return path


JOINS = [Event("join", 0.0, {"worker": k, "incarnation": 0, "arrived": k}) for k in range(2)]
TURNS = [commit(0, 1, 0), commit(1, 2, 0), *(commit(k % 2, k + 1, k - 1, distance=0.25) for k in range(2, 20))]


def looks(best: float) -> list[Event]:
    looks = [{"seconds": t, "clock": k, "loss": 1.0, "accuracy": best * t} for k, t in enumerate((0.5, 1.0))]
    return [Event("validation", look["seconds"], look) for look in looks]


def test_a_run_is_told_worker_by_worker(tmp_path: Path) -> None:
    run = make(tmp_path / "run", [*JOINS, *TURNS], {"cluster": {"idle_seconds": [1.0, 4.0], "computing_seconds": [7.0, 4.0]}})
    done = analyse(run)
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["0", "10", "0.90", "1", "0.25", "12.5%"] in rows
    assert ["1", "10", "1.00", "1", "0.25", "50.0%"] in rows
    assert "19 = 20 (other windows in flight" in done.stdout
    assert "− 1 (windows that no commit ended)" in done.stdout
    assert "about 1 - 1/n = 0.50 for n = 2 workers" in done.stdout
    assert "This run cannot show its size" in done.stdout
    assert "WARNING" not in done.stdout


def test_a_record_of_old_without_joins_distances_and_summary_is_read(tmp_path: Path) -> None:
    done = analyse(make(tmp_path / "run", [commit(k % 3, k + 1, max(0, k - 2)) for k in range(30)]))
    assert done.exit_code == 0, done.output
    assert "WARNING" not in done.stdout


def test_a_record_with_lines_missing_says_so(tmp_path: Path) -> None:
    events = [*JOINS, *TURNS[:5], *TURNS[8:], Event("gap", 3.0, {"lines": 3})]
    assert "lines of the record are missing" in analyse(make(tmp_path / "run", events)).stdout


def test_two_runs_are_compared(tmp_path: Path) -> None:
    good, poor = (make(tmp_path / name, [*TURNS, *looks(best)]) for name, best in (("good", 0.9), ("poor", 0.45)))
    assert "2.0000 (ahead" in analyse(good, "--against", poor).stdout
    assert "0.5000 (behind" in analyse(poor, "--against", good).stdout


def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = analyse(make(tmp_path / "run", [*JOINS, *TURNS]), "--figures", tmp_path / "pictures")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "pictures" / "staleness.png").stat().st_size > 1000


def refused(done: Result, *named: str) -> None:
    assert done.exit_code == 2, done.output
    said = " ".join(done.stderr.split())
    for part in named:
        assert part in said


def test_what_is_not_a_run_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    refused(analyse(tmp_path / "nowhere"), "nowhere", "no record.jsonl", "runs/")
    refused(analyse(tmp_path / "file"), "no record.jsonl")
    refused(analyse(tmp_path / "empty"), "no record.jsonl", "paragrad train")
    refused(analyse(make(tmp_path / "young", JOINS)), "no applied commit")
    run = make(tmp_path / "run", TURNS)
    refused(analyse(run, "--against", tmp_path / "empty"), "no record.jsonl")
    refused(analyse(run, "--against", run), "0 validations", "--validate-every")
