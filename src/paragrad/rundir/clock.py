"""The clock of a run: seconds of training, in real time or in the virtual time of a simulated cluster."""

from __future__ import annotations

import time
from collections.abc import Callable


class RunClock:
    """Counts from the start barrier to the last commit; seconds before a resume are included."""

    def __init__(self) -> None:
        self._now: Callable[[], float] = time.monotonic
        self.virtual = False
        """True if the seconds are those of a simulated cluster."""
        self.before = 0.0
        """Seconds before the last resume."""
        self.began: float | None = None
        self._wall_began = 0.0
        self._ended: tuple[float, float] | None = None

    def use(self, now: Callable[[], float]) -> None:
        """Take the seconds from the clock of a simulated cluster."""
        self._now, self.virtual = now, True

    def go(self) -> None:
        """Start, when the start barrier has been passed."""
        self._wall_began = time.monotonic()
        self.began = self._now()

    def end(self) -> None:
        """Stop, when the last commit has been applied."""
        self._ended = self._ended or self._read()

    def _read(self) -> tuple[float, float]:
        return self._now(), time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the last start or resume."""
        return 0.0 if self.began is None else (self._ended or self._read())[0] - self.began

    @property
    def seconds(self) -> float:
        """Training time so far, including the time before a resume."""
        return self.before + self.elapsed

    @property
    def wall_seconds(self) -> float:
        """Real time since the last start or resume."""
        return 0.0 if self.began is None else (self._ended or self._read())[1] - self._wall_began
