"""BackupWorkers: synchronous SGD that does not wait for the slowest; late gradients are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, Vector


@dataclass(frozen=True)
class BackupWorkers(Scheme):
    """g = Σ wᵢ gᵢ / Σ wᵢ over the first n - b gradients;  c <- one step of the optimiser on g;  every worker takes c.

    wᵢ is the loss's own normaliser, as in SyncSGD. A gradient that comes after its round is dropped, and its
    rows are done again from the new center. Chen et al., *Revisiting Distributed Synchronous SGD* (2016),
    arXiv:1604.00981. BackupWorkers(backups=0) is SyncSGD.

    Choose it when workers are as a rule equally fast, but now and then one of them is held up; one that is always slow does
    no harm, but nearly all of its work is thrown away.
    Not when speeds differ widely: a round still waits for the slowest of the n - b. Take AEASGD or SoftSync.
    """

    backups: int = 1
    """How many of the workers a round does not wait for."""

    ships = "gradient"
    late = "drop"
    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window != 1:
            raise UsageError(f"window={self.window}, but BackupWorkers exchanges a gradient at every step: leave window at 1.")
        if self.backups < 0:
            raise UsageError(f"backups={self.backups}, but a round does without 0 or more of its workers.")
        if self.bound is not None:
            raise UsageError("BackupWorkers is synchronous and drops what is late: a bound has no meaning, leave it out.")

    def quorum(self, workers: int) -> int:
        if self.backups >= workers:
            raise UsageError(
                f"backups={self.backups} with workers={workers} leaves nobody to wait for: of n workers at most n - 1, here "
                f"{workers - 1}, can be backups."
            )
        return workers - self.backups

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        center.step(center.mean(commits))
        return center.value
