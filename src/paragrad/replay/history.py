"""The arrivals at the center of a run, in order, read from its record for a replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paragrad.core.layout import expand
from paragrad.errors import UsageError
from paragrad.types import Batches, Event


@dataclass(frozen=True, slots=True)
class Arrival:
    """One arrival at the center: a worker that joined or left, or a commit."""

    number: int
    """Number of the arrival in the run, from 1."""
    kind: str
    """join, leave, commit (applied, rejected, or still waiting), repeated, or forgotten by a center that was killed."""
    worker: int
    incarnation: int = 0
    sequence: int = 0
    version: int = 0
    saw: int = 0
    """Clock of the last answer that its worker had read."""
    steps: int = 0
    batches: Batches = ()
    pulls: tuple[int, ...] = ()
    seconds: float = 0.0
    loss: float | None = None
    clock: int | None = None
    """Update in which it was applied."""
    why: str | None = None
    """Reason why it was rejected: late, or not finite."""
    state: bool = False
    """True if a worker that joined got the private state of its predecessor."""

    def __str__(self) -> str:
        what = {"join": "joined", "leave": "left"}.get(self.kind, f"commit {self.sequence}")
        return f"worker {self.worker} {what}" if self.kind in ("join", "leave") else f"{what} of worker {self.worker}"


@dataclass
class Attempt:
    """Part of a run: from its start, or from a checkpoint that it was resumed from, to its end or the next such checkpoint."""

    start: Mapping[str, Any]
    """Data of its event ``start``."""
    begins: int = 0
    """Number of arrivals before it, which the checkpoint contains."""
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    taken: dict[tuple[int, int], bool] = field(default_factory=dict)
    """Network engine, by worker and incarnation: True if it still had the residual of its codec."""

    @property
    def clock(self) -> int:
        """Last update of this attempt; 0 if there is none."""
        return max((arrival.clock or 0 for arrival in self.arrivals.values()), default=0)

    def add(self, arrival: Arrival) -> None:
        """Add an arrival."""
        before = self.arrivals.setdefault(arrival.number, arrival)
        if before is not arrival:
            raise UsageError(f"The record has two arrivals with the number {arrival.number}: {before} and {arrival}.")

    def skip(self, last: int, forgotten: Iterable[int]) -> None:
        """Account for a restart of the center after the arrival ``last``; waiting commits, which it forgot, were sent again."""
        self.arrivals = {number: arrival for number, arrival in self.arrivals.items() if number <= last}
        self.arrivals |= {number: Arrival(number, "forgotten", -1) for number in forgotten}

    def cut(self, begins: int, waiting: Iterable[Mapping[str, Any]]) -> None:
        """Drop the arrivals after a checkpoint that the run was resumed from; commits that waited then were never applied."""
        self.arrivals = {number: arrival for number, arrival in self.arrivals.items() if number <= begins}
        for commit in waiting:
            arrival = _commit(commit)
            self.arrivals[arrival.number] = arrival


@dataclass
class History:
    """Everything that determined the center of a run, attempt by attempt."""

    attempts: list[Attempt] = field(default_factory=list)
    ended: str | None = None
    """Reason why the run ended; None if it was killed."""
    whole: bool = False
    """True if the run produced a model."""
    left_out: int = 0
    """Number of lines that were lost because the disk was full."""


def read(events: Iterable[Event]) -> History:
    """Return the history of a run, given its events."""
    history, start = History(), None
    for event in events:
        try:
            if event.kind == "start":
                start = event.data
                history.ended, history.whole = None, False
                if not history.attempts:
                    history.attempts.append(Attempt(start))
            elif event.kind == "resume":
                assert start is not None
                _go_back(history, start, event.data)
            elif event.kind == "restart":
                history.attempts[-1].skip(event.data["arrived"], event.data["forgotten"])
            elif event.kind == "residual":
                history.attempts[-1].taken[event.data["worker"], event.data["incarnation"]] = event.data["taken"]
            elif event.kind == "gap":
                history.left_out += event.data["lines"]
            elif event.kind == "end":
                history.ended, history.whole = event.data["reason"], "summary" in event.data
            else:
                arrival = _arrival(event)
                if arrival is not None:
                    history.attempts[-1].add(arrival)
        except (KeyError, IndexError, AssertionError) as error:
            raise UsageError(
                f"The record cannot be replayed: an event {event.kind!r} at {event.time} s lacks "
                f"{error.args[0] if error.args else 'its start'!r}. It was written by an older version, or its beginning is "
                "missing."
            ) from error
    return history


def _go_back(history: History, start: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Drop everything after the checkpoint from which a run was resumed; without one, the run starts again."""
    begins = data["arrived"]
    kept = [attempt for attempt in history.attempts if attempt.begins < begins] if data["path"] is not None else []
    if kept:
        kept[-1].cut(begins, data["waiting"])
    history.attempts = [*kept, Attempt(start, begins)]


def _arrival(event: Event) -> Arrival | None:
    data = event.data
    match event.kind:
        case "join":
            return Arrival(data["arrived"], "join", data["worker"], data["incarnation"], state=data.get("state", False))
        case "leave":
            return Arrival(data["arrived"], "leave", data["worker"])
        case "commit":
            return replace(_commit(data), clock=data["clock"], seconds=data["seconds"], loss=data["loss"])
        case "refused":
            return replace(_commit(data), why=data["why"])
        case "repeated":
            return Arrival(data["arrived"], "repeated", data["worker"], data["incarnation"], data["sequence"])
    return None


def _commit(data: Mapping[str, Any]) -> Arrival:
    return Arrival(
        data["arrived"],
        "commit",
        data["worker"],
        data["incarnation"],
        data["sequence"],
        version=data["version"],
        saw=data.get("saw", data["version"]),
        steps=data["steps"],
        batches=tuple(expand(data["batches"])),
        pulls=tuple(data.get("pulls", ())),
    )
