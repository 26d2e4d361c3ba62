"""Validation of the center on any engine: snapshots at the points of the grid, their metrics, and the best weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from paragrad.rundir import checkpoint
from paragrad.rundir.best import Best, lowest, wanted
from paragrad.rundir.grid import Grid, Snapshot
from paragrad.rundir.record import read, validations
from paragrad.types import Event

if TYPE_CHECKING:
    from paragrad.rundir.session import Session

QUEUED, QUEUED_BYTES = 64, 1 << 30
"""Most snapshots that may wait, and their most bytes; two may always wait."""
PENDING = "pending."
"""Prefix of the tensors of waiting snapshots in a checkpoint."""
DIGITS = 7
"""Digits of the metrics in the record."""

Metrics = Mapping[str, float]


class Snapshots:
    """Copies of the center at the points of the grid, taken at exactly that update, whatever the load of the machine.

    An engine evaluates the waiting snapshots in order and calls ``validated``. Or it sets ``evaluate``, and none waits.
    """

    def __init__(self, session: Session, held_out: int) -> None:
        self._session = session
        self._on = held_out > 0
        self._grid = Grid(session.run.validate_every, rows=session.plan.rows, held_out=held_out)
        self.waiting: deque[Snapshot] = deque()
        """Snapshots to be evaluated; the first is being evaluated."""
        self.evaluate: Callable[[Snapshot], Metrics] | None = None
        """Evaluates a snapshot at once, if the engine can."""
        self.make_room: Callable[[], None] = lambda: None
        """Blocks until one of the waiting snapshots has been evaluated."""
        self.best = Best(session.directory)
        self._lowest = math.inf
        self._no_better = 0
        self._skipped = False
        self._point = 0
        """Last update that was a point of the grid."""

    # -- taking snapshots -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start or resume: evaluate waiting snapshots if possible, and take one before the first update."""
        session = self._session
        while self.waiting and self.evaluate is not None:
            self.validated(self.evaluate(self.waiting[0]))
        first = self._grid.begin(self._samples, session.clock, session.seconds)
        if self._on and first and not (self.waiting or session.tally.validations):
            self._take()

    def updated(self, *, last: bool) -> None:
        """Take a snapshot if the update is a point; ``conclude`` validates the ``last`` update of a run."""
        session = self._session
        if self._on and self._grid.crosses(self._samples, session.clock, session.seconds):
            self._point = session.clock
            if not last:
                self._take()

    def _take(self) -> None:
        if self.is_decided:
            return
        if not self._has_room():
            if not (self._session.run.stop.looks or self._session.run.keeps_best):
                self._note_skipped_point()
                return
            while not self._has_room():  # decisions by validation must not depend on its speed
                self.make_room()
            if self.is_decided:
                return
        snapshot = self.of_center(copied=True)
        if self.evaluate is not None:
            self._record_metrics(snapshot, self.evaluate(snapshot))
        else:
            self.waiting.append(snapshot)

    def _has_room(self) -> bool:
        if len(self.waiting) < 2:
            return True
        return len(self.waiting) < QUEUED and (len(self.waiting) + 1) * self.waiting[0].bytes <= QUEUED_BYTES

    def _note_skipped_point(self) -> None:
        if not self._skipped:
            self._skipped = True
            self._session.emit(
                "note",
                message=f"Validation is slower than training: {len(self.waiting)} snapshots wait, and further points are "
                "skipped until there is room. Validate less often (validate_every, --validate-every), or on fewer rows.",
            )

    @property
    def _samples(self) -> int:
        return self._session.tally.samples

    def of_center(self, *, copied: bool = False) -> Snapshot:
        """Return the present center; its tensors are shared unless ``copied``."""
        session, center = self._session, self._session.center
        tensors = center.model()
        if copied:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        epoch = session.epoch_at(self._samples)
        return Snapshot(center.clock, self._samples, epoch, round(session.seconds, 6), tensors)

    # -- results --------------------------------------------------------------------------------------------

    def validated(self, metrics: Metrics) -> None:
        """Record the metrics of the first waiting snapshot."""
        self._record_metrics(self.waiting.popleft(), metrics)

    def give_up(self) -> None:
        """Drop the first waiting snapshot, because it cannot be evaluated."""
        self.waiting.popleft()

    def conclude(self, metrics: Metrics) -> None:
        """Record the metrics of the final center."""
        history = self._session.tally.validations
        snapshot = self.of_center()
        if not history or history[-1]["clock"] != snapshot.clock:
            self._record_metrics(snapshot, metrics, last=True)

    @property
    def is_decided(self) -> bool:
        """True if validation has ended the run and chosen the weights.

        Later updates are not validated, because their number depends on the speed of the validation.
        """
        return self._session.stopped in ("target", "patience") and self.best.snapshot is not None

    def _record_metrics(self, snapshot: Snapshot, metrics: Metrics, *, last: bool = False) -> None:
        session, stop = self._session, self._session.run.stop
        figures = {name: float(f"{value:.{DIGITS}g}") for name, value in metrics.items()}
        session.emit("validation", **snapshot.facts, **figures)
        loss = figures["loss"]
        session.explosion.validated(loss, snapshot.clock)
        if self._is_best(loss) and session.run.keeps_best:
            clocks = [*checkpoint.clocks(session.directory / "checkpoints"), session.checkpoints.writing]
            self._warn_of_best(self.best.keep(snapshot, wanted(session.tally.validations, clocks)))
        if last:
            return
        if stop.accuracy is not None and figures.get("accuracy", -math.inf) >= stop.accuracy:
            session.stop("target")
        if stop.loss is not None and loss <= stop.loss:
            session.stop("target")
        if stop.patience is not None and self._no_better >= stop.patience:
            session.stop("patience")
        if self.is_decided:
            self.waiting.clear()

    def _is_best(self, loss: float) -> bool:
        """Count one more validation; return whether it is the best so far."""
        better = loss < self._lowest
        self._lowest, self._no_better = (loss, 0) if better else (self._lowest, self._no_better + 1)
        return better

    def finish(self) -> None:
        """Wait until the best weights are written."""
        self._warn_of_best(self.best.finish())

    def _warn_of_best(self, error: str | None) -> None:
        if error is not None:
            self._session.emit(
                "warning",
                message=f"The best weights could not be written ({error}). They are in memory, but would be lost if the run "
                "were killed. Free disk space.",
            )

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        """Return the waiting snapshots for a checkpoint: tensors and plain numbers."""
        tensors = {f"{PENDING}{k}.{n}": t for k, one in enumerate(self.waiting) for n, t in one.tensors.items()}
        return tensors, [snapshot.facts for snapshot in self.waiting]

    @property
    def at_point(self) -> bool:
        """True if the center is at a point of the grid.

        A run that is stopped elsewhere is validated as well, but that is not part of its curve if it is resumed.
        """
        return self._point == self._session.clock

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Restore from a checkpoint; earlier validations are read from the record."""
        session = self._session
        point = numbers.get("point", True)
        self._point = session.clock if point else -1
        here = Event("resume", session.seconds, {"clock": session.clock, "point": point})
        history = session.tally.validations = [dict(look.data) for look in validations([*read(session.directory), here])]
        for look in history:
            self._is_best(look["loss"])
            if look["clock"] == 0:
                session.explosion.validated(look["loss"], 0)
        known = {look["clock"] for look in history}
        for k, facts in enumerate(numbers.get("pending", ())):
            mine = {name: tensors[f"{PENDING}{k}.{name}"] for name in ("value", "buffers", "integers")}
            if facts["clock"] not in known:
                self.waiting.append(Snapshot(**facts, tensors=mine))
        best = lowest(history)
        if session.run.keeps_best and best is not None and (why := self.best.recall(best["clock"])) is not None:
            self._lowest, self._no_better = math.inf, 0
            session.emit(
                "warning",
                message=f"The best weights so far, of update {best['clock']}, cannot be read ({why}). Only the best from now "
                "on are kept.",
            )
