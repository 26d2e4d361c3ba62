"""One incarnation of a simulated worker: its loop, and where in it it is."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from paragrad.engines.crowd import Due
from paragrad.replica import Replica, Untrained
from paragrad.types import Commit, Reply
from paragrad.worker import Answer, Request


@dataclass(slots=True)
class Life:
    """One incarnation of a worker."""

    rank: int
    incarnation: int
    me: Replica
    untrained: Untrained
    loop: Generator[Request, Answer, None]
    request: Request | None = None
    due: Due | None = None
    began: float = 0.0
    reply: Reply | None = None
    waits_for: int = 0
    """The sequence of the commit whose answer counts; below 0: of joining."""
    waiting_since: float | None = None
    sent: Commit | None = None
    alive: bool = True
