"""Lists the runs in a directory with their status, from the first and last lines of each record."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from paragrad.config import options
from paragrad.errors import UsageError
from paragrad.rundir.claim import is_claimed

T = TypeVar("T")

TAIL = 1 << 16
"""Bytes at the end of a record that are read first."""
LONG_TAIL = 1 << 22
"""Bytes that are read to find the last validation of a run without an end."""
STATUS = {"finished": "finished", "interrupted": "interrupted", "ended at once": "interrupted", "Diverged": "diverged"}
"""Status by the reason in the event ``end``."""
STOPS = ("seconds", "target", "patience", "callback")
"""Reasons of a stop that the user set beforehand."""
CONTINUES = {"start", "resume", "restart", "go", "commit", "refused", "validation", "join"}
"""Events that show that the run continued; others may follow the event ``end``."""


@dataclass(frozen=True)
class Listed:
    """Facts about one run; None if unknown."""

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
    """Validation loss."""
    train_loss: float | None = None
    samples_per_second: float | None = None
    seconds: float | None = None
    virtual: bool = False
    """True if ``seconds`` are those of a simulated cluster."""
    started: str | None = None
    """Time of the start or of the last resume."""
    written: str | None = None
    """Time of the last write to the record."""


def found(directory: str | Path) -> list[Listed]:
    """Return the runs in a directory, oldest first, or the run if the directory is one."""
    top = Path(directory)
    if not top.is_dir():
        raise UsageError(f"There is no directory {str(top)!r}. Give the directory of your runs, such as runs.")
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
    except OSError:  # no permission
        return False


def look(path: Path) -> Listed:
    """Return the facts about the run in a directory."""
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
        return Listed(name, "damaged (its record does not begin with the event start)", started=started)
    summary: dict[str, Any] = {}
    if isinstance(end.get("summary"), dict):
        with suppress(OSError):
            summary = _event((path / "summary.json").read_bytes())
        summary |= end["summary"]
    virtual = "cluster" in start
    figures = _of_summary(summary, start) if summary else _of_tail(path, start, virtual=virtual)
    reason = str(end.get("reason"))
    if not end:
        status = "running" if running else "unfinished"
    else:
        status = STATUS.get(reason) or (f"stopped ({reason})" if reason in STOPS else f"failed ({reason})")
    return Listed(
        name,
        status,
        scheme=_typed(start.get("scheme"), str),
        engine=_typed(start.get("engine"), str),
        workers=_typed(start.get("workers"), int),
        virtual=virtual,
        started=started,
        written=_time_of(path / "record.jsonl"),
        **figures,
    )


def _of_summary(summary: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    samples, rows = _number(summary.get("samples")), _number(start.get("rows"))
    return {
        "epochs_done": round(samples / rows, 3) if samples is not None and rows else None,
        "epochs": _typed(summary.get("epochs"), int),
        "accuracy": _number(summary.get("test_accuracy")),
        "loss": _number(summary.get("test_loss")),
        "train_loss": _number(summary.get("train_loss")),
        "samples_per_second": _number(summary.get("samples_per_second")),
        "seconds": _number(summary.get("seconds")),
    }


def _of_tail(path: Path, start: Mapping[str, Any], *, virtual: bool) -> dict[str, Any]:
    """Return the figures of a run without a summary, from its last commit and validation."""
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
    settings: dict[str, Any] = {}
    with suppress(UsageError):
        settings = options.read_toml(path / "run.toml", "")
    rows, done = _number(start.get("rows")), _number(commit.get("epoch"))
    rate = done * rows / seconds if done and rows and seconds and not virtual else None
    return {
        "epochs_done": None if done is None else round(done, 3),
        "epochs": _typed(settings.get("epochs", start.get("epochs")), int),
        "accuracy": _number(validation.get("accuracy")),
        "loss": _number(validation.get("loss")),
        "train_loss": _number(commit.get("loss")),
        "samples_per_second": None if rate is None else round(rate, 2),
        "seconds": seconds,
    }


def _end(path: Path) -> dict[str, Any]:
    """Return the event ``end`` of a record; empty if there is none, or if a resumed run continued after it."""
    size = TAIL
    while True:
        for event in _backwards(path, size):
            if event.get("event") == "end":
                return event
            if event.get("event") in CONTINUES:
                return {}
        if size >= path.stat().st_size:
            return {}
        size *= 16


def _backwards(path: Path, size: int) -> Iterator[dict[str, Any]]:
    """Yield the complete lines in the last ``size`` bytes of a record, the last one first."""
    with path.open("rb") as file:
        beginning = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(beginning)
        lines = file.read().split(b"\n")
    yield from map(_event, reversed(lines[1 if beginning else 0 : -1]))


# -- values of files that may be damaged ----------------------------------------------------------------------------


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _typed(value: Any, kind: type[T]) -> T | None:
    return value if isinstance(value, kind) else None


def _time_of(path: Path) -> str | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime).isoformat(sep=" ", timespec="seconds")
    except OSError:
        return None


def since(moment: str) -> float:
    """Return the seconds since a moment in local time; 0 if the clock of another machine is ahead."""
    return max(0.0, time.time() - datetime.fromisoformat(moment).timestamp())
