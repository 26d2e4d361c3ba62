"""The record of a run: its events as JSON lines."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paragrad.core.layout import expand
from paragrad.errors import UsageError
from paragrad.rundir.claim import claim
from paragrad.types import Event

FLUSH_EVERY = 0.5
TOGETHER = 256
"""Number of events that are encoded at a time."""
MANY = ("commit", "refused", "repeated", "join", "leave")
"""Frequent events, which do not cause a flush."""
HELD = 32 << 20
"""Most bytes of lines that wait in memory while the disk is full; later lines are only counted."""

BETWEEN = '},{"event":'
ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False).encode


class Record:
    """Appends events to ``record.jsonl``, which is locked (see ``claim``) and flushed every half second and at the end.

    On a full disk, lines wait in memory until there is room again. So only the last line can be incomplete, if the run ends
    before that. Lines beyond ``HELD`` bytes are dropped, and an event ``gap`` holds their number.
    """

    def __init__(self, path: Path) -> None:
        _remove_torn_line(path)
        self._file = path.open("ab", buffering=0)
        claim(self._file.fileno())
        self._lines: list[Event] = []
        self._waiting = bytearray()
        self._left_out = 0
        self._flushed = time.monotonic()
        self.error: OSError | None = None
        """Error of the last attempt to write; None if it succeeded."""

    def write(self, event: Event) -> None:
        """Append an event."""
        if not self._left_out and len(self._waiting) < HELD:
            self._append(event)
        else:
            self._left_out += 1
        if event.kind not in MANY or time.monotonic() - self._flushed > FLUSH_EVERY:
            self.flush()
            if self._left_out and self.error is None:
                self._append(Event("gap", event.time, {"lines": self._left_out}))
                self._left_out = 0

    def flush(self) -> int:
        """Hand all lines to the operating system; return the file descriptor, so that the caller can sync it."""
        self._flushed = time.monotonic()
        self._encode()
        try:
            while self._waiting:
                # Remove only the bytes that were written: the next attempt may continue in the middle of a line.
                del self._waiting[: os.write(self._file.fileno(), self._waiting)]
            self.error = None
        except OSError as error:
            self.error = error
        return self._file.fileno()

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        with contextlib.suppress(OSError):
            self._file.close()

    def _append(self, event: Event) -> None:
        self._lines.append(event)
        if len(self._lines) >= TOGETHER:
            self._encode()

    def _encode(self) -> None:
        # Many lines at a time, because encoding them one by one takes three times as long.
        if self._lines:
            lines = [{"event": e.kind, "time": round(e.time, 6), **e.data} for e in self._lines]
            try:
                text = ENCODE(lines)
            except ValueError:  # NaN or infinity: rare, so that checking every number first would cost more
                text = ENCODE(plain(lines))
            # Quotes inside strings are escaped, so that BETWEEN occurs only between two events.
            self._waiting += (text[1:-1].replace(BETWEEN, BETWEEN.replace(",", "\n")) + "\n").encode()
            self._lines.clear()


def plain(value: Any) -> Any:
    """Return the value for JSON, which has neither NaN nor infinity: both become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def file_of(run: str | Path) -> Path:
    """Return the record of a run, given its directory or the record itself; raise if there is none."""
    path = Path(run) / "record.jsonl" if not str(run).endswith(".jsonl") else Path(run)
    if not path.is_file():
        raise UsageError(
            f"There is no run in {str(run)!r}: it has no record.jsonl. Give the directory of a run of paragrad train, "
            "such as one of those in runs/."
        )
    return path


def is_virtual(start: Mapping[str, Any]) -> bool:
    """Return whether the run has virtual time (a simulated cluster), given its event ``start``."""
    return "cluster" in start


def read(run: str | Path) -> Iterator[Event]:
    """Yield the events of a record, without a last line that a kill left incomplete."""
    path = file_of(run)
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            try:
                data: dict[str, Any] = json.loads(line)
            except json.JSONDecodeError as error:
                raise UsageError(f"Line {number} of {path} is not an event: {error}") from error
            yield Event(data.pop("event"), data.pop("time"), data)


def _remove_torn_line(path: Path) -> None:
    """Remove a last line that a kill left incomplete, before more is appended."""
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            with path.open("r+b") as file:
                file.truncate(whole)


def effective(events: Iterable[Event]) -> list[Event]:
    """Return the applied commits that led to the final center.

    Commits after a checkpoint that the run was resumed from are left out. So is a commit that was in the record, but not yet
    in the memory of a center that was killed.
    """
    commits: list[Event] = []
    for event in events:
        if event.kind in ("resume", "restart"):
            commits = [c for c in commits if c.data["clock"] <= event.data["clock"]]
        elif event.kind == "commit":
            commits.append(event)
    return commits


def validations(events: Iterable[Event]) -> list[Event]:
    """Return the validations of a run, one per update, at the time of that update; values that were not finite are NaN.

    Validations after a checkpoint that the run was resumed from are left out. So is the one at which the run was stopped,
    unless it is a point of the grid.
    """
    looks: dict[int, Event] = {}
    for event in events:
        if event.kind in ("resume", "restart"):
            last = event.data["clock"] - (not event.data.get("point", True))
            looks = {clock: look for clock, look in looks.items() if clock <= last}
        elif event.kind == "validation":
            figures = {name: math.nan if value is None else value for name, value in event.data.items()}
            looks[event.data["clock"]] = Event(event.kind, event.data["seconds"], figures)
    return list(looks.values())


def batches_used(events: Iterable[Event]) -> Counter[int]:
    """Return how often each mini-batch was used in an applied commit."""
    used: Counter[int] = Counter()
    for commit in effective(events):
        used.update(expand(commit.data["batches"]))
    return used
