"""What goes wrong in a cluster, and when: a fault is a value, with the second of the cluster's clock at which it strikes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from paragrad.cluster.times import not_negative, positive
from paragrad.errors import UsageError


@dataclass(frozen=True)
class Crash:
    """A worker dies without notice, and a replacement joins later."""

    worker: int
    """Its rank, from 0."""
    at: float
    """The second at which it dies."""
    down: float = 1.0
    """Seconds until the replacement joins."""

    def __post_init__(self) -> None:
        _settle(self)


@dataclass(frozen=True)
class Pause:
    """A worker stands still for a while, and goes on as if nothing had been."""

    worker: int
    """Its rank, from 0."""
    at: float
    """The second at which it stops."""
    seconds: float
    """How long it stands still."""

    def __post_init__(self) -> None:
        _settle(self)


@dataclass(frozen=True)
class Slow:
    """A worker is slower for a while: the steps that it begins in that time take longer."""

    worker: int
    """Its rank, from 0."""
    at: float
    """The second from which it is slow."""
    factor: float
    """How many times as long a step takes; below 1 it is faster."""
    seconds: float = math.inf
    """How long it is slow; by default to the end."""

    def __post_init__(self) -> None:
        _settle(self)


@dataclass(frozen=True)
class Leave:
    """A worker goes, and does not come back unless a Join follows."""

    worker: int
    """Its rank, from 0."""
    at: float
    """The second at which it goes."""

    def __post_init__(self) -> None:
        _settle(self)


@dataclass(frozen=True)
class Join:
    """A worker comes: one that was not there before, or one that comes back after a Leave."""

    worker: int
    """Its rank, from 0."""
    at: float
    """The second at which it comes."""

    def __post_init__(self) -> None:
        _settle(self)


@dataclass(frozen=True)
class Partition:
    """No message passes between some workers and the center; what is sent meanwhile arrives afterwards."""

    workers: tuple[int, ...]
    """The ranks that are cut off."""
    at: float
    """The second at which they are cut off."""
    seconds: float
    """How long they are cut off."""

    def __post_init__(self) -> None:
        _settle(self)


@dataclass(frozen=True)
class CenterCrash:
    """The center does not answer for a while. Its state survives; messages that waited there are lost and sent again."""

    at: float
    """The second at which it goes down."""
    down: float = 1.0
    """Seconds until it answers again."""

    def __post_init__(self) -> None:
        _settle(self)


@dataclass(frozen=True)
class DropMessage:
    """A worker's next message to the center is lost once, or the next answer to it."""

    worker: int
    """Its rank, from 0."""
    at: float
    """The second from which on a message is the next."""
    answer: bool = False
    """Whether it is the center's answer that is lost."""

    def __post_init__(self) -> None:
        _settle(self)


@dataclass(frozen=True)
class DuplicateMessage:
    """A worker's next message to the center arrives twice."""

    worker: int
    """Its rank, from 0."""
    at: float
    """The second from which on a message is the next."""

    def __post_init__(self) -> None:
        _settle(self)


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
"""Every fault by its ``kind`` in text and TOML."""


def workers_of(fault: Fault) -> tuple[int, ...]:
    """The ranks that a fault is about; none for one of the center."""
    if isinstance(fault, Partition):
        return fault.workers
    return () if isinstance(fault, CenterCrash) else (fault.worker,)


def _settle(fault: Any) -> None:
    """Check each field by what it is called, and store it in its own type."""
    kind = type(fault).__name__
    for field in fields(fault):
        value: Any = getattr(fault, field.name)
        name = f"{kind}: {field.name}"
        if field.name == "worker":
            value = _rank(name, value)
        elif field.name == "workers":
            if not isinstance(value, Sequence) or isinstance(value, str) or not value:
                raise UsageError(f"{name}={value!r}, but it is a list of at least one worker's rank.")
            value = tuple(_rank(name, rank) for rank in value)
        elif field.name in ("at", "down"):
            value = not_negative(name, value, "a number of seconds")
        elif field.name == "answer":
            if not isinstance(value, bool):
                raise UsageError(f"{name}={value!r}, but it is true or false.")
        elif not (kind == "Slow" and field.name == "seconds" and value == math.inf):
            value = positive(name, value, "a number" + " of seconds" * (field.name == "seconds"))
        object.__setattr__(fault, field.name, value)


def _rank(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"{name}={value!r}, but a worker's rank is a whole number, 0 or more.")
    return value
