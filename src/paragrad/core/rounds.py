"""A round: commits that have arrived and wait for a quorum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paragrad.data.leases import Leases
from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import Batches, Commit


def check_quorum(scheme: Scheme, workers: int) -> int:
    """Return the number of commits in a round. Raise if these workers cannot reach it."""
    quorum = scheme.quorum(workers)
    if scheme.bound is not None and quorum == workers > 1 and scheme.held:
        raise UsageError(f"{scheme!r} is synchronous: a bound on staleness has no meaning, leave it out.")
    if not 1 <= quorum <= workers:
        raise UsageError(f"{scheme!r} needs a quorum of {quorum} commits from {workers} workers; it must be 1 to {workers}.")
    return quorum


class Round:
    """Commits of one round, in the order of their arrival."""

    def __init__(self, scheme: Scheme, workers: int) -> None:
        self._held = scheme.held
        self._quorum = check_quorum(scheme, workers)
        self.gathers = self._quorum > 1
        """True if an update uses several commits."""
        self.commits: list[Commit] = []

    def add(self, commit: Commit) -> None:
        """Add a commit. It is copied if its worker continues without a reply: its next commit would overwrite this one."""
        self.commits.append(commit.copied() if self.gathers and not self._held else commit)

    def take(self) -> list[Commit]:
        """Return all commits, sorted by worker, and begin the next round."""
        commits = sorted(self.commits, key=lambda c: (c.worker, c.sequence)) if self.gathers else self.commits
        self.commits = []
        return commits

    def put_back(self, commits: Iterable[Commit]) -> None:
        """Put commits that ``take`` returned back into the round."""
        self.commits = [*commits, *self.commits]

    def of(self, worker: int) -> list[Commit]:
        """Return a worker's commits."""
        return [commit for commit in self.commits if commit.worker == worker]

    def batches(self, worker: int) -> Batches:
        """Return the mini-batches of a worker's commits: they count even if the worker is lost."""
        return tuple(position for commit in self.commits if commit.worker == worker for position in commit.batches)

    def count(self, worker: int) -> int:
        """Return the number of mini-batches of a worker's commits."""
        return len(self.batches(worker)) if self.commits else 0

    def holds(self, commit: Commit) -> bool:
        """Return whether a commit arrived before and waits in the round."""
        return any(c.worker == commit.worker and c.sequence == commit.sequence for c in self.commits)

    @property
    def blocked(self) -> set[int]:
        """Workers that get no reply until the round is applied."""
        return {commit.worker for commit in self.commits} if self.commits and self._held else set()

    def is_complete(self, live: Iterable[int], leases: Leases) -> bool:
        """Return whether the round has a quorum, or no worker is left that could add a commit."""
        if not self.commits or not self.gathers:
            return bool(self.commits)
        if not self._held:
            return len(self.commits) >= self._quorum or not any(leases.count(worker) > self.count(worker) for worker in live)
        here = {commit.worker for commit in self.commits}
        return len(here) >= self._quorum or not any(worker not in here and leases.held(worker) for worker in live)


def check_names(scheme: Scheme, kinds: Sequence[str]) -> None:
    """Raise if a scheme declares a string instead of a tuple of names."""
    for kind in kinds:
        if isinstance(getattr(scheme, kind), str):
            raise UsageError(f"{type(scheme).__name__}.{kind} is a string, but must be a tuple of names: a comma is missing.")
