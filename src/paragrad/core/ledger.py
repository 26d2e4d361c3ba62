"""The ledger of the center: what each worker's incarnations have sent, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from paragrad.types import Commit


@dataclass
class Counts:
    """Totals of what has happened at the center."""

    commits: int = 0
    refused: int = 0
    dropped: int = 0
    duplicates: int = 0
    steps: int = 0
    rows: int = 0


class Ledger:
    """Counts commits and workers. The last applied sequence of each worker is not here: it changes with the center's value."""

    def __init__(self, workers: int) -> None:
        self.counts = Counts()
        self.arrivals = 0
        """Commits that have come in, and workers that have joined or left."""
        self.speeds = [0.0] * workers
        """Local steps per second of each worker, 0 where none has been seen."""
        self.commits = [0] * workers
        """Commits applied of each worker, for bounds on staleness."""
        self.incarnations = [0] * workers
        self.refusals = [0] * workers
        """Commits of each worker that were refused in a row."""
        self.rejected = [0] * workers
        """Sequence of the last commit of each worker's present incarnation that was dropped or refused."""

    def joins(self, worker: int, incarnation: int, least: int) -> None:
        """Note a worker that joins; ``least``: as many commits count as made, so that it holds nobody back."""
        self.incarnations[worker] = max(incarnation, self.incarnations[worker])
        self.rejected[worker] = 0
        self.commits[worker] = max(self.commits[worker], least)

    def is_replaced(self, commit: Commit) -> bool:
        """Return whether another worker has taken the rank of this commit's worker."""
        return commit.incarnation < self.incarnations[commit.worker]

    def is_rejected(self, commit: Commit) -> bool:
        """Return whether the commit was dropped or refused before."""
        return commit.sequence <= self.rejected[commit.worker]

    def applied(self, commit: Commit) -> None:
        """Count a commit that was applied."""
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
        """Count a commit that is not finite; return how many there were in a row."""
        self.counts.refused += 1
        self.refusals[worker] += 1
        return self.refusals[worker]
