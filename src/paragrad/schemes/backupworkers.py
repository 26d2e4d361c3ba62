"""BackupWorkers: synchronous SGD that does not wait for the slowest workers and drops late gradients."""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.errors import UsageError
from paragrad.schemes.syncsgd import SyncSGD


@dataclass(frozen=True)
class BackupWorkers(SyncSGD):
    """g = Σ wᵢ gᵢ / Σ wᵢ over the first n - b gradients;  c <- one step of the optimiser on g;  every worker takes c.

    wᵢ is the normaliser of the loss, as in SyncSGD. The center drops a gradient that arrives after its round, and its rows are
    trained again from the new center. Chen et al., *Revisiting Distributed Synchronous SGD* (2016), arXiv:1604.00981.
    BackupWorkers(backups=0) is SyncSGD.

    Choose it if workers are usually equally fast, but sometimes one is delayed. A straggler that is always slow does no harm,
    but nearly all of its work is lost.
    Not if speeds differ widely: a round still waits for the slowest of the n - b. Take AEASGD or SoftSync.
    """

    backups: int = 1
    """Number of workers that a round does not wait for."""

    late = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backups < 0:
            raise UsageError(f"backups={self.backups}, but it must be a number of workers, 0 or more.")

    def quorum(self, workers: int) -> int:
        if self.backups >= workers:
            raise UsageError(
                f"backups={self.backups} with workers={workers} leaves no worker to wait for: of n workers at most n - 1, here "
                f"{workers - 1}, can be backups."
            )
        return workers - self.backups
