"""The runs in a directory: what became of each, by the first and last lines of its record. No record is read whole."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from paragrad.config import options
from paragrad.errors import UsageError
from paragrad.rundir.claim import is_claimed

TAIL = 1 << 16
"""Bytes at the end of a record that are looked at first."""
LONG_TAIL = 1 << 22
"""The same where a run has no end, and its last validation is looked for."""
STATUS = {"finished": "finished", "interrupted": "interrupted", "ended at once": "interrupted", "Diverged": "diverged"}
"""Status by the reason that a record ends with."""
STOPS = ("seconds", "target", "patience", "callback")
"""Reasons of a stop that was asked for beforehand."""
GOES_ON = {"start", "resume", "restart", "go", "commit", "refused", "validation", "join"}
"""Events after which there is more to come; others may follow the end."""


@dataclass(frozen=True)
class Listed:
    """One run, as far as its directory tells; None is unknown."""

    run: str
    status: str
    """finished, stopped (why), interrupted, diverged, failed (why), running, unfinished, damaged (why)."""
    scheme: str | None = None
    engine: str | None = None
    workers: int | None = None
    epochs_done: float | None = None
    epochs: int | None = None
    accuracy: float | None = None
    loss: float | None = None
    """On the validation rows."""
    train_loss: float | None = None
    samples_per_second: float | None = None
    seconds: float | None = None
    virtual: bool = False
    """Whether ``seconds`` are those of a simulated cluster."""
    started: str | None = None
    """When it was started or, later, resumed."""
    written: str | None = None
    """When its record was last written to."""


def found(directory: str | Path) -> list[Listed]:
    """The runs directly in a directory (or the one that it is), oldest first."""
    top = Path(directory)
    if not top.is_dir():
        raise UsageError(f"There is no directory {str(top)!r}. Give the one that your runs are written to, such as runs.")
    if _is_run(top):
        return [look(top)]
    try:
        inside = [path for path in top.iterdir() if _is_run(path)]
    except OSError as error:
        raise UsageError(f"{str(top)!r} cannot be read ({error.strerror}). Give another directory.") from error
    return sorted(map(look, inside), key=lambda listed: (listed.started or "", listed.run))


def _is_run(path: Path) -> bool:
    try:
        return any((path / name).is_file() for name in ("record.jsonl", "run.toml"))
    except OSError:  # a directory that may not be looked into
        return False


def look(path: Path) -> Listed:
    """One run, by its directory."""
    name, started = str(path), _time_of(path / "run.toml")
    try:
        with (path / "record.jsonl").open("rb") as file:
            start = _event(file.readline(LONG_TAIL))
            end = _end(path / "record.jsonl")
            running = not end and is_claimed(path / "record.jsonl")
    except FileNotFoundError:
        return Listed(name, "damaged (no record.jsonl)", started=started)
    except OSError as error:
        return Listed(name, f"damaged ({error.strerror})", started=started)
    if start.get("event") != "start":
        return Listed(name, "damaged (its record does not begin with a start)", started=started)
    reason = end.get("reason")
    summary = _loaded(path / "summary.json") | end["summary"] if isinstance(end.get("summary"), dict) else {}
    virtual = "cluster" in start
    figures = _of_summary(summary, start) if summary else _of_tail(path, start, virtual=virtual)
    return Listed(
        name,
        ("running" if running else "unfinished") if not end else _status(str(reason)),
        scheme=_text(start.get("scheme")),
        engine=_text(start.get("engine")),
        workers=_whole(start.get("workers")),
        virtual=virtual,
        started=started,
        written=_time_of(path / "record.jsonl"),
        **figures,
    )


def _status(reason: str) -> str:
    return STATUS.get(reason) or (f"stopped ({reason})" if reason in STOPS else f"failed ({reason})")


def _of_summary(summary: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    samples, rows = _number(summary.get("samples")), _number(start.get("rows"))
    return {
        "epochs_done": round(samples / rows, 3) if samples is not None and rows else None,
        "epochs": _whole(summary.get("epochs")),
        "accuracy": _number(summary.get("test_accuracy")),
        "loss": _number(summary.get("test_loss")),
        "train_loss": _number(summary.get("train_loss")),
        "samples_per_second": _number(summary.get("samples_per_second")),
        "seconds": _number(summary.get("seconds")),
    }


def _of_tail(path: Path, start: Mapping[str, Any], *, virtual: bool) -> dict[str, Any]:
    """What the last commit and validation of a run without a summary tell."""
    commit: dict[str, Any] = {}
    validation: dict[str, Any] = {}
    seconds = None
    for event in _backwards(path / "record.jsonl", LONG_TAIL):
        seconds = seconds if seconds is not None else _number(event.get("time"))
        if event.get("event") == "commit":
            commit = commit or event
        elif event.get("event") == "validation":
            validation = event
            break
    rows, done = _number(start.get("rows")), _number(commit.get("epoch"))
    rate = done * rows / seconds if done and rows and seconds and not virtual else None
    return {
        "epochs_done": None if done is None else round(done, 3),
        "epochs": _whole(_settings(path).get("epochs", start.get("epochs"))),
        "accuracy": _number(validation.get("accuracy")),
        "loss": _number(validation.get("loss")),
        "train_loss": _number(commit.get("loss")),
        "samples_per_second": None if rate is None else round(rate, 2),
        "seconds": seconds,
    }


def _end(path: Path) -> dict[str, Any]:
    """The event that a record ends with; empty where there is none, or a resumed run has gone on after it."""
    size = TAIL
    while True:
        for event in _backwards(path, size):
            if event.get("event") == "end":
                return event
            if event.get("event") in GOES_ON:
                return {}
        if size >= path.stat().st_size:
            return {}
        size *= 16


def _backwards(path: Path, size: int) -> Iterator[dict[str, Any]]:
    """The whole lines in the last ``size`` bytes of a record, the last first; one cut short by a kill is left out."""
    with path.open("rb") as file:
        beginning = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(beginning)
        lines = file.read().split(b"\n")
    yield from map(_event, reversed(lines[1 if beginning else 0 : -1]))


# -- what a damaged file may hold is anything -----------------------------------------------------------------------


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _loaded(path: Path) -> dict[str, Any]:
    try:
        return _event(path.read_bytes())
    except OSError:
        return {}


def _settings(path: Path) -> dict[str, Any]:
    try:
        return options.read_toml(path / "run.toml", "")
    except UsageError:
        return {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _time_of(path: Path) -> str | None:
    """When a file was last written, in local time."""
    try:
        return datetime.fromtimestamp(path.stat().st_mtime).isoformat(sep=" ", timespec="seconds")
    except OSError:
        return None


def since(moment: str) -> float:
    """Seconds since a moment in local time; 0 where another machine's clock is ahead."""
    return max(0.0, time.time() - datetime.fromisoformat(moment).timestamp())
