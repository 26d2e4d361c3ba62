"""The record of a run: events as JSON lines, written as they happen and read back whole."""

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
"""Events that become lines at once."""
MANY = ("commit", "refused", "repeated", "join", "leave")
"""Events that come in numbers: they need not be on their way to the disk at once."""
HELD = 32 << 20
"""Bytes of lines that wait in memory for room on the disk; what comes after them is only counted."""

BETWEEN = '},{"event":'
ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False).encode


class Record:
    """Appends events to ``record.jsonl``; flushed every half second, and at the end. The file is claimed meanwhile.

    What a full disk does not take waits in memory and is written when there is room: no line is torn, except the last
    one of a run that ends meanwhile. Lines beyond ``HELD`` are left out, and an event ``gap`` says how many.
    """

    def __init__(self, path: Path) -> None:
        _mend(path)
        self._file = path.open("ab", buffering=0)
        claim(self._file.fileno())
        self._lines: list[Event] = []
        self._waiting = bytearray()
        self._left_out = 0
        self._flushed = time.monotonic()
        self.error: OSError | None = None
        """Why lines wait, where the last attempt to write them failed."""

    def write(self, event: Event) -> None:
        """One more line."""
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
        """Hand everything to the operating system; returns the descriptor, for whoever wants it on the disk."""
        self._flushed = time.monotonic()
        self._encode()
        try:
            while self._waiting:
                # Exactly what was taken is forgotten: the next attempt goes on in the middle of the line.
                del self._waiting[: os.write(self._file.fileno(), self._waiting)]
            self.error = None
        except OSError as error:
            self.error = error
        return self._file.fileno()

    def close(self) -> None:
        """Write out what is left."""
        self.flush()
        with contextlib.suppress(OSError):
            self._file.close()

    def _append(self, event: Event) -> None:
        self._lines.append(event)
        if len(self._lines) >= TOGETHER:
            self._encode()

    def _encode(self) -> None:
        """Lines are made many at a time: one by one, between all that else happens, takes three times as long."""
        if self._lines:
            lines = [{"event": e.kind, "time": round(e.time, 6), **e.data} for e in self._lines]
            try:
                text = ENCODE(lines)
            except ValueError:  # a figure that is not finite, which is rare: looking at every one beforehand would cost more
                text = ENCODE(plain(lines))
            # A quote inside a text is escaped, so that this stands between two events and nowhere else.
            self._waiting += (text[1:-1].replace(BETWEEN, BETWEEN.replace(",", "\n")) + "\n").encode()
            self._lines.clear()


def plain(value: Any) -> Any:
    """Return the value as JSON can hold it: JSON has neither NaN nor infinity, so null stands for both."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def file_of(run: str | Path) -> Path:
    """The record of a run, by its directory or by itself; raises where there is none."""
    path = Path(run) / "record.jsonl" if not str(run).endswith(".jsonl") else Path(run)
    if not path.is_file():
        raise UsageError(
            f"There is no run in {str(run)!r}: it has no record.jsonl. Give the directory of a run that paragrad train made, "
            "such as one of those in runs/."
        )
    return path


def is_virtual(start: Mapping[str, Any]) -> bool:
    """Whether a run's seconds are those of a simulated cluster, by the first event of its record."""
    return "cluster" in start


def read(run: str | Path) -> Iterator[Event]:
    """The events of a run's record; a last line cut short by a kill is left out."""
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


def _mend(path: Path) -> None:
    """Cut off a last line that a kill left half-written, before more is appended."""
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            with path.open("r+b") as file:
                file.truncate(whole)


def effective(events: Iterable[Event]) -> list[Event]:
    """The applied commits that the final center is made of: those after a checkpoint that a run went back to are left out, as
    is one that a center was killed over when the record had it and its memory not yet."""
    commits: list[Event] = []
    for event in events:
        if event.kind in ("resume", "restart"):
            commits = [c for c in commits if c.data["clock"] <= event.data["clock"]]
        elif event.kind == "commit":
            commits.append(event)
    return commits


def looked(events: Iterable[Event]) -> list[Event]:
    """The validations of a run, one for each update, each at the time of that update. Those that a resumed run went back behind
    are left out, as is that of where it was stopped, unless that is a point of its grid. What was not finite is NaN."""
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
    """How often each mini-batch was used in an applied commit."""
    used: Counter[int] = Counter()
    for commit in effective(events):
        used.update(expand(commit.data["batches"]))
    return used
