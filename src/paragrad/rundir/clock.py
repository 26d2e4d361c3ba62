"""The clock of a run: seconds of training, by the wall or by a simulated cluster."""

from __future__ import annotations

import time
from collections.abc import Callable


class RunClock:
    """Runs from the start barrier to the last commit; seconds before a resume are included."""

    def __init__(self) -> None:
        self._now: Callable[[], float] = time.monotonic
        self.virtual = False
        """Whether the run's seconds are those of a simulated cluster."""
        self.before = 0.0
        """Seconds before the last resume."""
        self.began: float | None = None
        self._ended: float | None = None
        self._wall_began: float | None = None
        self._wall_ended: float | None = None

    def use(self, now: Callable[[], float]) -> None:
        """Let the run's seconds be those of a simulated cluster."""
        self._now, self.virtual = now, True

    def go(self) -> None:
        """Start: the start barrier has been passed."""
        self._wall_began = time.monotonic()
        self.began = self._now()

    def end(self) -> None:
        """Stop: the last commit has been applied."""
        if self._ended is None:
            self._ended, self._wall_ended = self._now(), time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the last start or resume."""
        if self.began is None:
            return 0.0
        return (self._now() if self._ended is None else self._ended) - self.began

    @property
    def seconds(self) -> float:
        """Training time so far, that before a resume included."""
        return self.before + self.elapsed

    @property
    def wall_seconds(self) -> float:
        """Wall-clock time since the last start or resume."""
        if self._wall_began is None:
            return 0.0
        return (time.monotonic() if self._wall_ended is None else self._wall_ended) - self._wall_began
