"""What workers keep for themselves, as far as the center knows it: residuals of a codec, and private state."""

from __future__ import annotations

from collections.abc import Iterable

from paragrad.types import Commit, Vector, WorkerState


class PrivateStates:
    """Residuals and private states, by worker, after the last applied commit of each."""

    def __init__(self, *, kept: bool) -> None:
        self.residuals: dict[int, Vector] = {}
        """What a codec has left out of the applied commits of each worker, where that is known here."""
        self.states: dict[int, WorkerState] = {}
        """Private state of each worker, where its last applied commit has brought it; empty: it cannot be brought."""
        self.restored: dict[int, WorkerState] = {}
        """The same of a checkpoint that the run continues from, for workers without an applied commit since."""
        self.are_kept = kept
        """Whether workers have a private state."""

    def applied(self, commit: Commit) -> None:
        """Take what an applied commit brings."""
        worker = commit.worker
        if commit.residual is not None:
            self.residuals[worker] = commit.residual
        else:
            self.residuals.pop(worker, None)
        self.restored.pop(worker, None)
        self.keep(worker, commit.state)

    def keep(self, worker: int, state: WorkerState | None) -> None:
        """Keep the private state of a worker's last applied commit; None: it is not known."""
        if state is None:
            self.states.pop(worker, None)
        else:
            self.states[worker] = state

    def residual(self, worker: int, waiting: Iterable[Commit]) -> Vector | None:
        """Return what a newcomer's first commit takes along: left by the last commit of its rank that counts, or will."""
        left = [commit.residual for commit in waiting]
        return left[-1] if left else self.residuals.get(worker)
