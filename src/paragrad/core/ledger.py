"""The ledger of the center: counts of commits, and the incarnation and speed of each worker."""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.types import Commit


@dataclass
class Counts:
    """Totals of a run at the center."""

    commits: int = 0
    refused: int = 0
    dropped: int = 0
    duplicates: int = 0
    steps: int = 0
    rows: int = 0


class Ledger:
    """Counts per worker. The last applied sequence number is in ``State`` instead: it changes with the center's value."""

    def __init__(self, workers: int) -> None:
        self.counts = Counts()
        self.arrivals = 0
        """Number of commits received plus number of workers that joined or left."""
        self.speeds = [0.0] * workers
        """Local steps per second of each worker, 0 before its first commit."""
        self.commits = [0] * workers
        """Applied commits per worker, for bounds on staleness."""
        self.incarnations = [0] * workers
        self.refusals = [0] * workers
        """Consecutive refused commits per worker."""
        self.rejected = [0] * workers
        """Sequence of the last dropped or refused commit of each worker's present incarnation."""

    def joins(self, worker: int, incarnation: int, least: int) -> None:
        """Register a worker that joins. It counts as having made ``least`` commits, so that no worker waits for it."""
        self.incarnations[worker] = max(incarnation, self.incarnations[worker])
        self.rejected[worker] = 0
        self.commits[worker] = max(self.commits[worker], least)

    def is_replaced(self, commit: Commit) -> bool:
        """Return whether a newer incarnation has replaced the commit's worker."""
        return commit.incarnation < self.incarnations[commit.worker]

    def is_rejected(self, commit: Commit) -> bool:
        """Return whether the commit was dropped or refused before."""
        return commit.sequence <= self.rejected[commit.worker]

    def applied(self, commit: Commit) -> None:
        """Count an applied commit."""
        worker = commit.worker
        self.refusals[worker] = 0
        if commit.seconds > 0:
            rate = commit.steps / commit.seconds
            old = self.speeds[worker]
            self.speeds[worker] = rate if old == 0 else 0.5 * (old + rate)
        self.commits[worker] += 1
        self.counts.commits += 1
        self.counts.steps += commit.steps
        self.counts.rows += commit.rows

    def refused(self, worker: int) -> int:
        """Count a commit that is not finite. Return the number of consecutive ones of this worker."""
        self.counts.refused += 1
        self.refusals[worker] += 1
        return self.refusals[worker]
