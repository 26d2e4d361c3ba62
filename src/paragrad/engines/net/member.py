"""A worker that has joined over a network, as the center knows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from paragrad.engines.transport.uploads import Uploads


@dataclass
class Member:
    """A worker that works, or worked, for a rank."""

    rank: int
    incarnation: int
    """Number of this worker among all that have worked for the rank."""
    key: str
    """Drawn at random by every process that joins; proves that a reconnecting worker is the same one."""
    host: str = ""
    pid: int = 0
    machine: str = ""
    shared: bool = False
    """True if it is on this machine and maps the center's memory."""
    heard_at: float = field(default_factory=time.monotonic)
    """Time of its last sign of life (monotonic)."""
    heartbeats: int = 0
    """Open connections over which it sends heartbeats."""
    ready: bool = False
    finished: bool = False
    lost_at: float | None = None
    silent: bool = False
    """True if it is taken for lost because there was no sign of life."""
    given_up: bool = False
    """True if it was lost for so long that another worker may have its rank."""
    knows_end: bool = False
    """True if it knows that the run is over."""
    sequence: int = 0
    """Sequence of its last message (below 0: of joining), which is answered before it may send another."""
    kept: tuple[int, ...] = ()
    """Commits of its rank whose residuals it has."""
    uploads: Uploads = field(default_factory=Uploads)

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that name it in the record."""
        return {"rank": self.rank, "incarnation": self.incarnation, "host": self.host}

    @property
    def is_present(self) -> bool:
        """True if it is ready, and neither finished nor lost."""
        return self.ready and not self.finished and self.lost_at is None
