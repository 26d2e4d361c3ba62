"""A worker that has joined over a network, as the center knows it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Member:
    """A worker that works, or worked, for a rank."""

    rank: int
    incarnation: int
    """Number of this worker among all that have worked for the rank."""
    key: str
    """Drawn at random by every process that joins; proves that a reconnecting worker is the same one."""
    where: str = ""
    pid: int = 0
    machine: str = ""
    shared: bool = False
    """It is on this machine, and maps the center's memory."""
    seen: float = field(default_factory=time.monotonic)
    """Time of its last sign of life (monotonic)."""
    heartbeats: int = 0
    """Open connections over which it sends heartbeats."""
    ready: bool = False
    finished: bool = False
    lost_at: float | None = None
    silent: bool = False
    """It is taken for lost because there was no sign of life."""
    given_up: bool = False
    """It was lost for so long that its rank is no longer its own."""
    knows_end: bool = False
    """It knows that the run is over."""
    said: int = 0
    """Sequence of its last message (below 0: of joining), which is answered before it may send another."""
    kept: tuple[int, ...] = ()
    """Commits of its rank whose residuals it has."""
    ticket: int = 0
    """Counts its exchanges: only the latest counts, a thread that still reads an earlier one stops."""
    filling: threading.Lock = field(default_factory=threading.Lock)
    """Held while bytes are put into its slot."""

    @property
    def named(self) -> dict[str, Any]:
        """Its name in the record."""
        return {"rank": self.rank, "incarnation": self.incarnation, "host": self.where}

    @property
    def here(self) -> bool:
        """Whether it works, or could."""
        return self.ready and not self.finished and self.lost_at is None

    def take_ticket(self) -> int:
        """Begin an exchange: no earlier one puts bytes into its slot from here on."""
        with self.filling:
            self.ticket += 1
            return self.ticket
