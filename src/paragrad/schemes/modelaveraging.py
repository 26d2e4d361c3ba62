"""ModelAveraging: workers train alone for a window, then all take the mean of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paragrad.core.replica import Replica
from paragrad.errors import UsageError
from paragrad.schemes.scheme import Synchronous
from paragrad.types import CenterView, Commit, Vector


@dataclass(frozen=True)
class ModelAveraging(Synchronous):
    """c <- Σ sᵢ wᵢ / Σ sᵢ, with sᵢ the steps of worker i's window;  every worker takes c.

    With one window as long as the run, this is one-shot averaging. Zinkevich et al., *Parallelized Stochastic Gradient Descent*
    (2010); McDonald, Hall, Mann (2010).

    Choose it if communication is expensive and all workers have similar data.
    Not with ``starts="own"`` for losses with many minima: the mean of two good points may be a bad point.
    """

    window: int = 10
    starts: Literal["center", "own"] = "center"
    """Workers start from the center, or each from its own random point."""

    ships = "weights"
    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.starts not in ("center", "own"):
            raise UsageError(f"starts={self.starts!r}, but workers start from the 'center' or from their 'own' point.")

    @property
    def carries(self) -> Literal[True] | str:
        reason = "workers that start from their own points would carry movement made there to the mean of all"
        return reason if self.starts == "own" else True

    def commit(self, me: Replica) -> Vector:
        return me.local

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        total = sum(commit.steps for commit in commits)
        mean = commits[0].value * (commits[0].steps / total)
        for commit in commits[1:]:
            mean.add_(commit.value, alpha=commit.steps / total)
        center.value = mean
        return center.value
