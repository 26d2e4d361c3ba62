"""Private state of workers, as far as the center knows it: residuals of a codec, optimiser states and slots."""

from __future__ import annotations

from collections.abc import Iterable

from paragrad.types import Commit, Vector, WorkerState


class PrivateStates:
    """Residuals and private states per worker, after the last applied commit of each."""

    def __init__(self, *, kept: bool) -> None:
        self.residuals: dict[int, Vector] = {}
        """Part of the applied commits that a codec left out, per worker; missing where the center does not know it."""
        self.states: dict[int, WorkerState] = {}
        """Private state that the last applied commit of a worker brought. Empty: the worker cannot bring it."""
        self.restored: dict[int, WorkerState] = {}
        """Private states of the checkpoint that the run continues from, for workers without an applied commit since."""
        self.are_kept = kept
        """True if workers have private state."""

    def applied(self, commit: Commit) -> None:
        """Keep the residual and the private state of an applied commit."""
        worker = commit.worker
        if commit.residual is not None:
            self.residuals[worker] = commit.residual
        else:
            self.residuals.pop(worker, None)
        self.restored.pop(worker, None)
        self.keep(worker, commit.state)

    def keep(self, worker: int, state: WorkerState | None) -> None:
        """Keep the private state after a worker's last applied commit; None: it is not known."""
        if state is None:
            self.states.pop(worker, None)
        else:
            self.states[worker] = state

    def residual(self, worker: int, waiting: Iterable[Commit]) -> Vector | None:
        """Return the residual for a worker that joins: of its rank's last commit that waits in the round or was applied."""
        left = [commit.residual for commit in waiting]
        return left[-1] if left else self.residuals.get(worker)
