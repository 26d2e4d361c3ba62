"""One incarnation of a simulated worker: its loop, and the state of its exchange."""

from __future__ import annotations

from dataclasses import dataclass, field

from paragrad.core.replica import Replica
from paragrad.core.worker import Driver
from paragrad.engines.sim.replicas import PendingWindow
from paragrad.types import Commit, Reply


@dataclass(slots=True)
class Incarnation:
    """One incarnation of a simulated worker."""

    rank: int
    incarnation: int
    me: Replica
    driver: Driver = field(init=False)
    due: PendingWindow | None = None
    began: float = 0.0
    reply: Reply | None = None
    waits_for: int = 0
    """Sequence of the commit whose answer the worker waits for, or a negative number after joining."""
    waiting_since: float | None = None
    sent: Commit | None = None
    brought: int = 0
    """Sequence of the last commit that brought the worker's private state."""
    committed: float = 0.0
    """Time of its last commit, or of its start before the first one."""
    alive: bool = True
