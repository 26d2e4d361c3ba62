"""Losses that explode: noticed at the first validation or commit that shows it, and said once."""

from __future__ import annotations

import math
from collections.abc import Callable

FACTOR = 10.0
"""A loss so many times that of the start has exploded."""
IN_A_ROW = 3
"""Commits in a row whose loss must say so: that of a single mini-batch may be large by chance."""
REMEDY = (
    "Lower the learning rate{rate}, scale the inputs (pg.Standardise(), --transform standardise), or clip gradients "
    "(clip_norm)."
)


class Explosion:
    """Compares losses with that of the start: of the validation before the first update, or else of the first commit."""

    def __init__(self, warn: Callable[..., None]) -> None:
        self._warn = warn
        self._start: float | None = None
        self._first: float | None = None
        self._large = 0
        self._rate = math.nan
        self._said = False

    def committed(self, loss: float, clock: int, rate: float) -> None:
        """A commit with this mean loss over its window was applied."""
        self._rate = rate
        if self._first is None:
            self._first = loss
        self._large = self._large + 1 if self._is_large(loss) else 0
        if self._large >= IN_A_ROW or not math.isfinite(loss):
            self._say("training loss", loss, clock)

    def refused(self, clock: int) -> None:
        """A commit was refused, since it was not finite."""
        self._say("training loss", math.nan, clock)

    def validated(self, loss: float, clock: int) -> None:
        """The center was validated."""
        if clock == 0:
            self._start = loss
        elif self._is_large(loss) or not math.isfinite(loss):
            self._say("validation loss", loss, clock)

    @property
    def _baseline(self) -> float:
        known = (self._first if self._start is None else self._start) or math.nan
        return known if known > 0 else math.nan

    def _is_large(self, loss: float) -> bool:
        return loss > FACTOR * self._baseline

    def _say(self, what: str, loss: float, clock: int) -> None:
        if self._said:
            return
        self._said = True
        before = f", more than {FACTOR:g} times the {self._baseline:.4g} of the start" if self._is_large(loss) else ""
        now = f"{loss:.4g}" if math.isfinite(loss) else "not finite"
        rate = f" (now {self._rate:.3g})" if math.isfinite(self._rate) else ""
        self._warn(
            message=f"Training diverges: at update {clock} the {what} is {now}{before}. " + REMEDY.format(rate=rate),
            loss=loss if math.isfinite(loss) else None,
            clock=clock,
        )
