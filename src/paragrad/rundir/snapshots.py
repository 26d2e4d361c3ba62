"""Validation of the center on any engine: snapshots at the points of the grid, those that wait, what was found, the best."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from paragrad.rundir import checkpoint
from paragrad.rundir.best import Best, lowest, wanted
from paragrad.rundir.grid import Grid, Snapshot
from paragrad.rundir.record import looked, read
from paragrad.types import Event

if TYPE_CHECKING:
    from paragrad.rundir.session import Session

QUEUED, QUEUED_BYTES = 64, 1 << 30
"""Snapshots that may wait, and what they may take; two in any case."""
PENDING = "pending."
"""Before the names of the tensors of those that wait, in a checkpoint."""
DIGITS = 7
"""Of the figures of a validation."""

Found = Mapping[str, float]


class Snapshots:
    """The center at the points of the grid, copied at exactly that update, so that curves do not depend on the machine's load.

    An engine validates what waits, in order, and calls ``validated``; or it sets ``evaluate``, and nothing waits.
    """

    def __init__(self, session: Session, held: int) -> None:
        self._session = session
        self._on = held > 0
        self._grid = Grid(session.run.validate_every, rows=session.plan.rows, held=held)
        self.waiting: deque[Snapshot] = deque()
        """Those that are yet to be validated; the first is being looked at."""
        self.evaluate: Callable[[Snapshot], Found] | None = None
        """Validates a snapshot at once, where an engine can."""
        self.make_room: Callable[[], None] = lambda: None
        """Waits until one of those that wait has been validated."""
        self.best = Best(session.directory)
        self._lowest = math.inf
        self._no_better = 0
        self._skipped = False
        self._point = 0
        """The last update that was a point of the grid."""

    # -- taken ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The run begins, or goes on."""
        session = self._session
        while self.waiting and self.evaluate is not None:
            self.validated(self.evaluate(self.waiting[0]))
        first = self._grid.begin(self._samples, session.clock, session.seconds)
        if self._on and first and not (self.waiting or session.tally.validations):
            self._take()

    def updated(self, *, last: bool) -> None:
        """The center has made an update. The ``last`` one of a run is left to ``conclude``."""
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
                self._skip()
                return
            while not self._has_room():  # what is decided by validation must not depend on how fast it is
                self.make_room()
            if self.is_decided:
                return
        snapshot = self.of_center(copied=True)
        if self.evaluate is not None:
            self._found(snapshot, self.evaluate(snapshot))
        else:
            self.waiting.append(snapshot)

    def _has_room(self) -> bool:
        if len(self.waiting) < 2:
            return True
        return len(self.waiting) < QUEUED and (len(self.waiting) + 1) * self.waiting[0].bytes <= QUEUED_BYTES

    def _skip(self) -> None:
        if not self._skipped:
            self._skipped = True
            self._session.emit(
                "note",
                message=f"Validation takes longer than the training between its points: {len(self.waiting)} snapshots wait, "
                "and further points are left out until there is room. Validate less often (validate_every, --validate-every), "
                "or on fewer rows.",
            )

    @property
    def _samples(self) -> int:
        return self._session.tally.samples

    def of_center(self, *, copied: bool = False) -> Snapshot:
        """The center as it is now; its tensors are its own unless ``copied``."""
        session, center = self._session, self._session.center
        tensors = center.model()
        if copied:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        epoch = session.epoch_at(self._samples)
        return Snapshot(center.clock, self._samples, epoch, round(session.seconds, 6), tensors)

    # -- validated ------------------------------------------------------------------------------------------

    def validated(self, found: Found) -> None:
        """The first of those that wait was looked at."""
        self._found(self.waiting.popleft(), found)

    def give_up(self) -> None:
        """The first of those that wait cannot be validated."""
        self.waiting.popleft()

    def conclude(self, found: Found) -> None:
        """The center was looked at once more, after the last update."""
        history = self._session.tally.validations
        snapshot = self.of_center()
        if not history or history[-1]["clock"] != snapshot.clock:
            self._found(snapshot, found, last=True)

    @property
    def is_decided(self) -> bool:
        """Whether validation has ended the run and chosen the weights: what the center has come to since depends on how long
        that took, and is not looked at."""
        return self._session.stopped in ("target", "patience") and self.best.snapshot is not None

    def _found(self, snapshot: Snapshot, found: Found, *, last: bool = False) -> None:
        session, stop = self._session, self._session.run.stop
        figures = {name: float(f"{value:.{DIGITS}g}") for name, value in found.items()}
        session.emit("validation", **snapshot.facts, **figures)
        loss = figures["loss"]
        session.explosion.validated(loss, snapshot.clock)
        if self._weigh(loss) and session.run.keeps_best:
            clocks = [*checkpoint.clocks(session.directory / "checkpoints"), session.checkpoints.writing]
            self._complain(self.best.keep(snapshot, wanted(session.tally.validations, clocks)))
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

    def _weigh(self, loss: float) -> bool:
        """Count one more validation; True where none before it was as good."""
        better = loss < self._lowest
        self._lowest, self._no_better = (loss, 0) if better else (self._lowest, self._no_better + 1)
        return better

    def finish(self) -> None:
        """Wait until the best weights are written."""
        self._complain(self.best.finish())

    def _complain(self, error: str | None) -> None:
        if error is not None:
            self._session.emit(
                "warning",
                message=f"The best weights could not be written ({error}): they are in memory, but a run that is killed "
                "and resumed cannot return to them. Make room on the disk.",
            )

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        """What waits, for a checkpoint: tensors, and plain numbers."""
        tensors = {f"{PENDING}{k}.{n}": t for k, one in enumerate(self.waiting) for n, t in one.tensors.items()}
        return tensors, [snapshot.facts for snapshot in self.waiting]

    @property
    def at_point(self) -> bool:
        """Whether the center is at a point of the grid. Where a run was stopped elsewhere, it is validated as well; but if it
        goes on, that is no part of its curve."""
        return self._point == self._session.clock

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: what was found until then is in the record."""
        session = self._session
        point = numbers.get("point", True)
        self._point = session.clock if point else -1
        here = Event("resume", session.seconds, {"clock": session.clock, "point": point})
        history = session.tally.validations = [dict(look.data) for look in looked([*read(session.directory), here])]
        for look in history:
            self._weigh(look["loss"])
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
                message=f"The best weights so far, of update {best['clock']}, cannot be read ({why}): the best from "
                "here on are kept.",
            )
