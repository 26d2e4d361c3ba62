"""Warns once, at the first validation or commit that shows that the loss explodes."""

from __future__ import annotations

import math
from collections.abc import Callable

FACTOR = 10.0
"""A loss has exploded if it is this many times the loss at the start."""
IN_A_ROW = 3
"""Number of commits in a row with such a loss: that of a single mini-batch may be large by chance."""
REMEDY = (
    "Lower the learning rate{rate}, scale the inputs (pg.Standardise(), --transform standardise), or clip gradients "
    "(clip_norm)."
)


class Explosion:
    """Compares losses with the validation before the first update or, without one, with the first commit."""

    def __init__(self, warn: Callable[..., None]) -> None:
        self._warn = warn
        self._start: float | None = None
        self._first: float | None = None
        self._large = 0
        self._rate = math.nan
        self._warned = False

    def committed(self, loss: float, clock: int, rate: float) -> None:
        """Check an applied commit by the mean loss over its window."""
        self._rate = rate
        if self._first is None:
            self._first = loss
        self._large = self._large + 1 if self._is_large(loss) else 0
        if self._large >= IN_A_ROW or not math.isfinite(loss):
            self._report("training loss", loss, clock)

    def refused(self, clock: int) -> None:
        """Warn of a commit that was rejected because it is not finite."""
        self._report("training loss", math.nan, clock)

    def validated(self, loss: float, clock: int) -> None:
        """Check a validation of the center."""
        if clock == 0:
            self._start = loss
        elif self._is_large(loss) or not math.isfinite(loss):
            self._report("validation loss", loss, clock)

    @property
    def _baseline(self) -> float:
        known = (self._first if self._start is None else self._start) or math.nan
        return known if known > 0 else math.nan

    def _is_large(self, loss: float) -> bool:
        return loss > FACTOR * self._baseline

    def _report(self, what: str, loss: float, clock: int) -> None:
        if self._warned:
            return
        self._warned = True
        before = f", more than {FACTOR:g} times the {self._baseline:.4g} of the start" if self._is_large(loss) else ""
        now = f"{loss:.4g}" if math.isfinite(loss) else "not finite"
        rate = f" (now {self._rate:.3g})" if math.isfinite(self._rate) else ""
        self._warn(
            message=f"Training diverges: at update {clock} the {what} is {now}{before}. " + REMEDY.format(rate=rate),
            loss=loss if math.isfinite(loss) else None,
            clock=clock,
        )
