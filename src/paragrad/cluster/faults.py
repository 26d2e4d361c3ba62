"""Faults of a cluster. Each is a value with the second, on the clock of the cluster, at which it happens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from paragrad.cluster.times import not_negative, positive
from paragrad.errors import UsageError


class _Checked:
    """Checks each field by its name, and stores it in its own type."""

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for field in fields(self):  # type: ignore[arg-type]
            value: Any = getattr(self, field.name)
            name = f"{kind}: {field.name}"
            if field.name == "worker":
                value = _rank(name, value)
            elif field.name == "workers":
                if not isinstance(value, Sequence) or isinstance(value, str) or not value:
                    raise UsageError(f"{name}={value!r}, but it must be a list of at least one worker's rank.")
                value = tuple(_rank(name, rank) for rank in value)
            elif field.name in ("at", "down"):
                value = not_negative(name, value, "a number of seconds")
            elif field.name == "answer":
                if not isinstance(value, bool):
                    raise UsageError(f"{name}={value!r}, but it must be true or false.")
            elif not (kind == "Slow" and field.name == "seconds" and value == math.inf):
                value = positive(name, value, "a number" + " of seconds" * (field.name == "seconds"))
            object.__setattr__(self, field.name, value)


@dataclass(frozen=True)
class _OfWorker(_Checked):
    worker: int
    """Rank of the worker, from 0."""
    at: float
    """Second at which it happens."""


@dataclass(frozen=True)
class Crash(_OfWorker):
    """A worker dies without notice, and a replacement joins later."""

    down: float = 1.0
    """Seconds until the replacement joins."""


@dataclass(frozen=True)
class Pause(_OfWorker):
    """A worker stops for a while, and then continues."""

    seconds: float
    """Length of the pause."""


@dataclass(frozen=True)
class Slow(_OfWorker):
    """A worker is slower for a while: the steps that it starts in that time take longer."""

    factor: float
    """Time of a step relative to its usual time; below 1 the worker is faster."""
    seconds: float = math.inf
    """Length of the slow phase; by default until the end."""


@dataclass(frozen=True)
class Leave(_OfWorker):
    """A worker leaves, and does not return unless a Join follows."""


@dataclass(frozen=True)
class Join(_OfWorker):
    """A worker joins, for the first time or after a Leave."""


@dataclass(frozen=True)
class Partition(_Checked):
    """The network between some workers and the center is cut; messages sent meanwhile arrive afterwards."""

    workers: tuple[int, ...]
    """Ranks of the workers that are cut off."""
    at: float
    """Second at which they are cut off."""
    seconds: float
    """Length of the cut."""


@dataclass(frozen=True)
class CenterCrash(_Checked):
    """The center is down for a while. Its state survives; messages that waited there are lost and sent again."""

    at: float
    """Second at which it goes down."""
    down: float = 1.0
    """Seconds until it answers again."""


@dataclass(frozen=True)
class DropMessage(_OfWorker):
    """The first message from a worker to the center at or after ``at`` is lost once, or the first answer to it."""

    answer: bool = False
    """True: the answer of the center is lost."""


@dataclass(frozen=True)
class DuplicateMessage(_OfWorker):
    """The first message from a worker to the center at or after ``at`` arrives twice."""


Fault: TypeAlias = Crash | Pause | Slow | Leave | Join | Partition | CenterCrash | DropMessage | DuplicateMessage

FAULTS: dict[str, type[Any]] = {
    "crash": Crash,
    "pause": Pause,
    "slow": Slow,
    "leave": Leave,
    "join": Join,
    "partition": Partition,
    "center_crash": CenterCrash,
    "drop_message": DropMessage,
    "duplicate_message": DuplicateMessage,
}
"""Faults by their ``kind`` in text and TOML."""


def workers_of(fault: Fault) -> tuple[int, ...]:
    """Return the ranks that a fault affects; none for a fault of the center."""
    if isinstance(fault, Partition):
        return fault.workers
    return () if isinstance(fault, CenterCrash) else (fault.worker,)


def _rank(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{name}={value!r}, but a worker's rank is a whole number, 0 or more.")
    return value
