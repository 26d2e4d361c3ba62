"""What a run looks like: live in a terminal, lines in a pipe, nothing when quiet."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from paragrad.data import progress
from paragrad.errors import counted
from paragrad.rundir import display as module
from paragrad.rundir.display import Display, duration, number
from paragrad.types import Event

START = {
    "scheme": "agn:window=5",
    "engine": "local:workers=2",
    "workers": 2,
    "epochs": 2,
    "batch_size": 10,
    "rows": 100,
    "batches": 10,
    "parameters": 1234,
    "seed": 0,
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def console(*, terminal: bool, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, color_system=None)


def text(made: Console) -> str:
    assert isinstance(made.file, io.StringIO)
    return made.file.getvalue()


def commit(worker: int, at: float, **changed: Any) -> Event:
    return Event("commit", at, {"worker": worker, "rows": 20, "loss": 0.5, "staleness": 1, "clock": 1} | changed)


def begin(shown: Display, workers: int = 2) -> None:
    shown(Event("start", 0.0, START | {"workers": workers}))
    for rank in range(workers):
        shown(Event("worker", 0.0, {"rank": rank, "pid": 4000 + rank, "incarnation": 0}))


def pictured(shown: Display) -> str:
    made = console(terminal=False, width=shown.console.width)
    made.print(shown.picture())
    return text(made)


def test_quiet_prints_nothing(clock: list[float]) -> None:
    made = console(terminal=True)
    shown = Display(made, quiet=True)
    begin(shown)
    shown(Event("warning", 0.0, {"message": "careful"}))
    shown(commit(0, 1.0))
    shown(Event("end", 2.0, {"reason": "finished", "summary": {}}))
    shown.close()
    assert text(made) == ""


def test_a_pipe_gets_plain_lines(clock: list[float]) -> None:
    made = console(terminal=False)
    shown = Display(made)
    begin(shown)
    shown(Event("go", 0.0))
    for step in range(4):
        clock[0] += 2.0
        shown(commit(step % 2, 2.0 * (step + 1)))
    shown(Event("validation", 8.0, {"clock": 4, "loss": 0.3, "accuracy": 0.9}))
    shown(Event("end", 9.0, {"reason": "finished", "summary": {}}))
    shown.close()
    lines = text(made).splitlines()
    assert "\x1b" not in text(made)
    assert len(lines) == 4, "a line at the start, after five seconds, at the validation, at the end"
    assert "agn:window=5" in lines[0]
    assert "1,234 parameters" in lines[0]
    assert "epoch 1/2 (30%)" in lines[1]
    assert "14.0 s left" in lines[1]
    assert "test accuracy 0.9000" in lines[2]
    assert lines[3].endswith("ended: finished")


def test_a_picture_has_a_row_for_each_worker(clock: list[float]) -> None:
    shown = Display(console(terminal=True))
    begin(shown)
    assert pictured(shown).count("warming up") == 2
    shown(Event("go", 0.0))
    clock[0] += 0.1
    shown(commit(0, 1.0, loss=0.25, staleness=7))
    shown(Event("lost", 1.0, {"rank": 1, "pid": 4001, "incarnation": 0, "reason": "SIGKILL"}))
    lines = pictured(shown).splitlines()
    row = next(line for line in lines if "4000" in line)
    assert row.replace("│", "").split() == ["0", "4000", "1", "0", "0.2500", "7", "●", "running"]
    assert "lost" in next(line for line in lines if "4001" in line)
    shown(Event("worker", 1.0, {"rank": 1, "pid": 4100, "incarnation": 1}))
    assert "replaced 1×" in pictured(shown)
    shown(Event("end", 2.0, {"reason": "finished", "summary": {}}))
    assert pictured(shown).count("done") == 2


@pytest.mark.parametrize(
    ("count", "what", "said"),
    [
        (1, "mini-batch", "1 mini-batch"),
        (2, "mini-batch", "2 mini-batches"),
        (1, "worker", "1 worker"),
        (0, "row", "0 rows"),
        (3, "epoch", "3 epochs"),
    ],
)
def test_one_has_a_singular(count: int, what: str, said: str) -> None:
    assert counted(count, what) == said


@pytest.mark.parametrize("terminal", [True, False])
def test_reading_that_takes_long_is_shown(clock: list[float], terminal: bool) -> None:
    made = console(terminal=terminal)
    with Display(made).reads():
        progress.report("reading events.csv", 1, 100)
        clock[0] += 6
        progress.report("reading events.csv", 50, 100)
        progress.report("reading events.csv", 51, 100)
        clock[0] += 6
        progress.report("fitting transformations", 30_000_000, 287_000_000, "bytes")
    progress.report("reading others", 1, 2)
    text = made.file.getvalue()
    assert "Reading events.csv: 50% of 100 rows" in text
    assert "Fitting transformations: 10% of 287 MB" in text
    assert "51%" not in text
    assert "others" not in text


def test_quick_reading_is_not_shown(clock: list[float]) -> None:
    made = console(terminal=False)
    with Display(made).reads():
        progress.report("reading events.csv", 100, 100)
    assert made.file.getvalue() == ""


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, _: str) -> int:
        raise OSError(28, "No space left on device")


def test_what_cannot_be_written_ends_nothing(clock: list[float]) -> None:
    shown = Display(Console(file=Full()))
    begin(shown)
    shown(Event("note", 1.0, {"message": "still training"}))
    shown.close()


def test_many_workers_are_counted(clock: list[float]) -> None:
    shown = Display(console(terminal=True))
    begin(shown, workers=20)
    seen = pictured(shown)
    shown.close()
    assert "… and 4 more" in seen
    assert "4015" in seen
    assert "4016" not in seen


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_picture_fits_the_terminal(clock: list[float], width: int) -> None:
    shown = Display(console(terminal=True, width=width))
    begin(shown)
    shown(commit(0, 1.0))
    seen = pictured(shown)
    shown.close()
    assert max(len(line) for line in seen.splitlines()) <= width


def test_pictures_are_drawn_four_times_a_second_at_most(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Display(console(terminal=True))
    begin(shown)
    drawn: list[float] = []
    monkeypatch.setattr(shown, "_tick", lambda now: (drawn.append(now), setattr(shown, "_next", now + module.REFRESH)))
    for step in range(1000):
        clock[0] += 0.001
        shown(commit(0, step * 0.001))
    shown.close()
    assert 3 <= len(drawn) <= 4


def test_rates_follow_the_rows(clock: list[float]) -> None:
    shown = Display(console(terminal=True))
    begin(shown)
    shown(Event("go", 0.0))
    for step in range(40):
        clock[0] += 0.1
        shown(commit(step % 2, 0.1 * (step + 1), rows=2))
    assert shown._rate == pytest.approx(20, rel=0.1)
    assert shown._workers[0].rate == pytest.approx(10, rel=0.2)
    shown(Event("end", 4.0, {"reason": "finished", "summary": {}}))
    assert shown._rate == pytest.approx(20)


def test_the_cursor_is_given_back_even_when_the_run_breaks(clock: list[float]) -> None:
    made = console(terminal=True)
    shown = Display(made)
    begin(shown)
    assert "\x1b[?25l" in text(made)
    shown.close()
    shown.close()
    assert text(made).rindex("\x1b[?25h") > text(made).rindex("\x1b[?25l")


@pytest.mark.parametrize("terminal", [True, False])
def test_warnings_and_losses_are_said_aloud(clock: list[float], terminal: bool) -> None:
    made = console(terminal=terminal)
    shown = Display(made)
    begin(shown)
    shown(Event("warning", 0.0, {"message": "known to diverge"}))
    shown(Event("note", 0.0, {"message": "a hold-out of 20 %"}))
    shown(Event("lost", 1.0, {"rank": 1, "pid": 4001, "incarnation": 0, "reason": "SIGKILL"}))
    shown(Event("refused", 1.0, {"worker": 0, "sequence": 3, "steps": 1, "why": "NaN"}))
    shown(Event("refused", 1.0, {"worker": 0, "sequence": 4, "steps": 1, "why": "late"}))
    shown.close()
    seen = text(made)
    assert "warning" in seen.lower()
    for part in ("known to diverge", "a hold-out of 20 %", "Worker 1 (pid 4001) was lost: SIGKILL", "Commit 3 of worker 0"):
        assert part in seen
    assert "Commit 4" not in seen, "a commit that the scheme drops is no fault"


def test_a_resumed_run_counts_what_was_done_before(clock: list[float]) -> None:
    shown = Display(console(terminal=False))
    begin(shown)
    shown(Event("resume", 10.0, {"clock": 5, "path": "0000000005", "rows": 100}))
    shown(Event("go", 10.0))
    shown(commit(0, 12.0))
    assert "epoch 2/2 (60%)" in shown._line()
    assert shown._line().endswith("8.0 s left")


def test_a_loss_that_is_missing_changes_nothing(clock: list[float]) -> None:
    shown = Display(console(terminal=False))
    begin(shown)
    shown(commit(0, 1.0, loss=2.0))
    shown(commit(0, 1.0, loss=None))
    shown(commit(0, 1.0, loss=float("nan")))
    assert shown._loss == 2.0


def test_figures_and_durations_read_well() -> None:
    assert [number(value) for value in (None, float("nan"), 0.5, 1e-9, 12345.0)] == ["–", "–", "0.5000", "1e-09", "1.23e+04"]
    assert [duration(value) for value in (0.25, 59.0, 61.0, 7260.0)] == ["0.2 s", "59.0 s", "1:01 min", "2:01 h"]
