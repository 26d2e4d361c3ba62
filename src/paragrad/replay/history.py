"""What came to the center of a run, in order, read back from its record: what a replay goes by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paragrad.core.layout import expand
from paragrad.errors import UsageError
from paragrad.types import Batches, Event


@dataclass(frozen=True, slots=True)
class Arrival:
    """One thing that the center heard of: a worker that joined or left, or a commit."""

    number: int
    """The center counts all arrivals of a run, from 1."""
    kind: str
    """join, leave, commit (applied, refused, or waiting still), repeated, or forgotten by a center that was killed."""
    worker: int
    incarnation: int = 0
    sequence: int = 0
    version: int = 0
    saw: int = 0
    """The clock of the answer that its worker had read."""
    steps: int = 0
    batches: Batches = ()
    pulls: tuple[int, ...] = ()
    seconds: float = 0.0
    loss: float | None = None
    clock: int | None = None
    """The update that it was applied in."""
    why: str | None = None
    """Why it was not applied: late, or not finite."""
    state: bool = False
    """Whether a worker that joined went on from what another in its place had kept to itself."""

    def __str__(self) -> str:
        what = {"join": "joined", "leave": "left"}.get(self.kind, f"commit {self.sequence}")
        return f"worker {self.worker} {what}" if self.kind in ("join", "leave") else f"{what} of worker {self.worker}"


@dataclass
class Attempt:
    """A run from its start, or from a checkpoint that it went back to, up to its end or to the next such checkpoint."""

    start: Mapping[str, Any]
    """What the record's event ``start`` says of it."""
    begins: int = 0
    """The number of arrivals before it: those that the checkpoint holds."""
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    taken: dict[tuple[int, int], bool] = field(default_factory=dict)
    """Of workers over a network that came to a place, with their incarnation: whether they had what a codec had left out."""

    @property
    def clock(self) -> int:
        """The last update of this attempt; 0 where it made none."""
        return max((arrival.clock or 0 for arrival in self.arrivals.values()), default=0)

    def add(self, arrival: Arrival) -> None:
        """One more."""
        before = self.arrivals.setdefault(arrival.number, arrival)
        if before is not arrival:
            raise UsageError(f"The record has two arrivals with the number {arrival.number}: {before} and {arrival}.")

    def skip(self, last: int, forgotten: Iterable[int]) -> None:
        """The center was killed after the arrival ``last`` and started again; commits that waited in a round came again."""
        self.arrivals = {number: arrival for number, arrival in self.arrivals.items() if number <= last}
        self.arrivals |= {number: Arrival(number, "forgotten", -1) for number in forgotten}

    def cut(self, begins: int, waiting: Iterable[Mapping[str, Any]]) -> None:
        """Forget what came after a checkpoint that the run went back to; what waited in a round then was never applied."""
        self.arrivals = {number: arrival for number, arrival in self.arrivals.items() if number <= begins}
        for told in waiting:
            arrival = _commit(told)
            self.arrivals[arrival.number] = arrival


@dataclass
class History:
    """All that made the center of a run what it is, attempt after attempt."""

    attempts: list[Attempt] = field(default_factory=list)
    ended: str | None = None
    """Why the run ended; None where it was cut off."""
    whole: bool = False
    """Whether the run came to a model."""
    left_out: int = 0
    """Lines that a full disk did not take."""
    done_again: int = 0
    """Mini-batches of commits that waited, their workers gone on, when the center was killed."""


def read(events: Iterable[Event]) -> History:
    """The history of a run from its record."""
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
                history.done_again += event.data["again"]
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
                f"The record cannot be replayed: of an event {event.kind!r} at {event.time} s it does not say "
                f"{error.args[0] if error.args else 'of which start'!r}. It was written by an older version, or its beginning "
                "is missing."
            ) from error
    return history


def _go_back(history: History, start: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """A run goes on from a checkpoint, or (without one) begins anew: what came after it is forgotten."""
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
