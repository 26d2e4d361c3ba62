"""One incarnation of a simulated worker: its loop, and where in it it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from paragrad.core.replica import Replica
from paragrad.core.worker import Driver
from paragrad.engines.sim.replicas import PendingWindow
from paragrad.types import Commit, Reply


@dataclass(slots=True)
class Incarnation:
    """One incarnation of a worker."""

    rank: int
    incarnation: int
    me: Replica
    driver: Driver = field(init=False)
    due: PendingWindow | None = None
    began: float = 0.0
    reply: Reply | None = None
    waits_for: int = 0
    """The sequence of the commit whose answer counts; below 0: of joining."""
    waiting_since: float | None = None
    sent: Commit | None = None
    brought: int = 0
    """The sequence of the last commit that brought what the worker keeps to itself."""
    committed: float = 0.0
    """When it last sent a commit; at first: when it was born."""
    alive: bool = True
