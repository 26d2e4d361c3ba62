"""A worker from elsewhere, as the center knows it: who it is, where it sits, when it was last heard of."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Guest:
    """A worker that sits, or sat, on a place."""

    rank: int
    incarnation: int
    key: str
    """What it is known by: drawn anew by every process that joins."""
    where: str = ""
    pid: int = 0
    machine: str = ""
    shared: bool = False
    """It is on this machine, and maps the center's memory."""
    seen: float = field(default_factory=time.monotonic)
    stays: int = 0
    """Connections over which it says that it is there."""
    ready: bool = False
    finished: bool = False
    lost_at: float | None = None
    silent: bool = False
    """It is taken for lost because nothing was heard of it."""
    given_up: bool = False
    """It was lost for so long that its place is no longer its own."""
    told: bool = False
    """It knows that the run is over."""
    said: int = 0
    """The sequence of what it last brought (below 0: that it is there), which is answered before it may bring more."""
    kept: tuple[int, ...] = ()
    """Commits of its place after which it knows what a codec had left out."""
    ticket: int = 0
    """Counts its exchanges: only the latest counts, a thread that still reads an earlier one stops."""
    filling: threading.Lock = field(default_factory=threading.Lock)
    """Held while bytes are put into its slot."""

    @property
    def named(self) -> dict[str, Any]:
        """Who it is, for the record."""
        return {"rank": self.rank, "incarnation": self.incarnation, "host": self.where}

    @property
    def here(self) -> bool:
        """Whether it works, or could."""
        return self.ready and not self.finished and self.lost_at is None

    def take_ticket(self) -> int:
        """From here on no earlier exchange puts bytes into its slot."""
        with self.filling:
            self.ticket += 1
            return self.ticket
