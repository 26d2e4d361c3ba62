"""A round: commits that have arrived and wait until there is a quorum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paragrad.data.leases import Leases
from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import Batches, Commit


def check_quorum(scheme: Scheme, workers: int) -> int:
    """Return how many commits make a round; raise where so many workers cannot bring them."""
    quorum = scheme.quorum(workers)
    if scheme.bound is not None and quorum == workers > 1 and scheme.held:
        raise UsageError(f"{scheme!r} is synchronous: a bound on staleness has no meaning, leave it out.")
    if not 1 <= quorum <= workers:
        raise UsageError(f"{scheme!r} needs a quorum of {quorum} commits from {workers} workers; it must be 1 to {workers}.")
    return quorum


class Round:
    """Commits of one round, in the order of their arrival."""

    def __init__(self, scheme: Scheme, workers: int) -> None:
        self._scheme = scheme
        self._workers = workers
        self._held = scheme.held
        self.gathers = check_quorum(scheme, workers) > 1
        """Whether an update is made of several commits."""
        self.commits: list[Commit] = []

    def add(self, commit: Commit) -> None:
        """Let a commit wait. One whose worker goes on meanwhile is copied: the worker overwrites it with its next one."""
        self.commits.append(commit.copied() if self.gathers and not self._held else commit)

    def take(self) -> list[Commit]:
        """Return all commits, sorted by worker, and begin the next round."""
        commits = sorted(self.commits, key=lambda c: (c.worker, c.sequence)) if self.gathers else self.commits
        self.commits = []
        return commits

    def put_back(self, commits: Iterable[Commit]) -> None:
        """Let commits that were taken wait again."""
        self.commits = [*commits, *self.commits]

    def of(self, worker: int) -> list[Commit]:
        """Return a worker's commits."""
        return [commit for commit in self.commits if commit.worker == worker]

    def batches(self, worker: int) -> Batches:
        """Return the mini-batches of a worker's commits: they count, whatever becomes of the worker."""
        return tuple(position for commit in self.commits if commit.worker == worker for position in commit.batches)

    def count(self, worker: int) -> int:
        """Return the number of mini-batches of a worker's commits."""
        return len(self.batches(worker)) if self.commits else 0

    def holds(self, commit: Commit) -> bool:
        """Return whether a commit has come before and waits."""
        return any(c.worker == commit.worker and c.sequence == commit.sequence for c in self.commits)

    @property
    def blocked(self) -> set[int]:
        """Workers that get no reply before the round is applied."""
        return {commit.worker for commit in self.commits} if self.commits and self._held else set()

    def is_complete(self, live: Iterable[int], leases: Leases) -> bool:
        """Return whether there is a quorum, or nobody is left who could bring more."""
        if not self.commits or not self.gathers:
            return bool(self.commits)
        here = {commit.worker for commit in self.commits}
        quorum = self._scheme.quorum(self._workers)
        if not self._held:
            at_work = any(leases.count(worker) > self.count(worker) for worker in live)
            return len(self.commits) >= quorum or not at_work
        if len(here) >= quorum:
            return True
        return not any(worker not in here and leases.held(worker) for worker in live)


def check_names(scheme: Scheme, kinds: Sequence[str]) -> None:
    """Raise where a scheme declares a text instead of a tuple of names."""
    for kind in kinds:
        if isinstance(getattr(scheme, kind), str):
            raise UsageError(f"{type(scheme).__name__}.{kind} is a text, but it must be a tuple of names: a comma is missing.")
