"""What happens around the exchange, on any engine: the record, checkpoints, validation, and when to stop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from paragrad.core.center import Center
from paragrad.core.snapshot import CenterNumbers, CenterSnapshot
from paragrad.core.worker import is_drawn
from paragrad.data.plan import Plan
from paragrad.run import Run, Watches
from paragrad.rundir import checkpoint
from paragrad.rundir.checkpoints import CheckpointWriter, Written
from paragrad.rundir.clock import RunClock
from paragrad.rundir.explosion import Explosion
from paragrad.rundir.record import Record
from paragrad.rundir.snapshots import Snapshots
from paragrad.rundir.tally import Tally
from paragrad.types import COMMIT, Commit, Event

POSTPONED = 0.05
"""Seconds after which it is tried again whether a checkpoint that is due may be written."""
PATIENCE, WINDOWS = 30.0, 3
"""Seconds, or windows of the slowest of them if that is longer, that a checkpoint waits for workers to bring what they keep."""
LAST = 10.0
"""Seconds that it waits for them where the run was interrupted."""


class Session:
    """One run as it happens. The engine tells it what happens, and asks it what is due."""

    def __init__(self, directory: Path, run: Run, plan: Plan, *, identity: dict[str, Any], held: int = 0) -> None:
        """``held``: rows to validate on."""
        self.directory = directory
        self.run = run
        self.plan = plan
        self._batches = plan.batches
        self.identity = identity
        self.tally = Tally()
        self.stopped: str | None = None
        self.interrupted_by: int = signal.SIGINT
        """The signal that first asked for the end."""
        self.interrupted_at: float | None = None
        """When it was first asked for by a signal (monotonic)."""
        self.resumed: checkpoint.Checkpoint | None = None
        self.anew = False
        """Whether the directory holds an earlier attempt of which nothing can be used."""
        self.settings: dict[str, Any] = {}
        """What run.toml says: for workers elsewhere."""
        self.at_close: list[Callable[[], None]] = []
        """What an engine wants done once the newest checkpoint holds the center as it is."""
        self.missing: Callable[[], list[int]] = list
        """Workers that have yet to bring something that belongs into a checkpoint, with their next commits."""
        self.announce: Callable[[bool], None] = lambda wanted: None
        """Called with whether workers are to bring it."""
        self._wanted_since: float | None = None
        self.measured: dict[str, Any] = {}
        """What the engine has to add to the summary."""
        self._center: Center | None = None
        self._drawn = False
        self.time = RunClock()
        """The clock of the run. Where it is virtual, the record holds nothing of the wall's clock."""
        self._samples_before = 0
        self.saved: int | None = None
        """The update that the newest checkpoint is of."""
        self._record = Record(directory / "record.jsonl")
        self._record_failed = False
        self._record_again = False
        self._checkpoint_at = math.inf
        self._asked = False
        self.checkpoints = CheckpointWriter(directory / "checkpoints")
        self.snapshots = Snapshots(self, held)
        self.explosion = Explosion(partial(self.emit, "warning"))

    # -- time -----------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Training time so far, from the start barrier on, that before a resume included."""
        return self.time.seconds

    @property
    def rate(self) -> float:
        """Samples per second of the wall's clock; where that is the run's own, that before a resume included."""
        virtual = self.time.virtual
        samples = self.tally.samples - (self._samples_before if virtual else 0)
        seconds = self.time.wall_seconds if virtual else self.seconds
        return samples / seconds if seconds else 0.0

    def go(self) -> None:
        """Start the clock: the start barrier has been passed."""
        self.time.go()
        self._checkpoint_at = self._next_checkpoint()
        self.emit("go")
        self.snapshots.begin()

    def _next_checkpoint(self) -> float:
        """By the wall's clock, on every engine: what a crash may cost is real time."""
        return math.inf if self.run.checkpoint_every is None else time.monotonic() + self.run.checkpoint_every

    # -- what happens ---------------------------------------------------------------------------------------

    def attach(self, center: Center) -> None:
        """Watch this center, and bring it to where a resumed run left off."""
        self._center = center
        self._drawn = is_drawn(center.value.numel(), center.workers)
        center.applied = self._applied
        center.refused = self._refused
        center.repeated = self._repeated
        center.came = self._came
        center.updated = self._updated
        for callback in self.run.callbacks:
            if isinstance(callback, Watches):
                callback.watch(center)
        if self.resumed is not None:
            numbers = CenterNumbers.read(self.resumed.numbers["center"])
            numbers.leases = {**numbers.leases, "epochs": self.plan.epochs}
            tensors, presence = self.resumed.tensors, numbers.presence
            center.restore(CenterSnapshot.read(tensors, numbers))
            self.saved = center.clock if presence is None else None
            self.tally = Tally.from_state(self.resumed.numbers["tally"])
            self._samples_before = self.tally.samples
            self.time.before = self.resumed.numbers["seconds"]
            self.snapshots.restore(tensors, self.resumed.numbers)
            if presence is not None:  # nothing was lost but the process: all goes on where it was
                self.emit(
                    "restart",
                    clock=center.clock,
                    arrived=center.ledger.arrivals,
                    forgotten=presence.forgotten,
                    again=sum(len(batches) for _, batches in presence.gone_on),
                )
                return
            self.emit(
                "resume",
                clock=center.clock,
                path=self.resumed.path.name,
                point=self.snapshots.at_point,
                rows=self.tally.samples,
                arrived=center.ledger.arrivals,
                waiting=self.resumed.numbers.get("waiting", []),
            )
        elif self.anew:
            self.emit("resume", clock=0, path=None, point=True, rows=0, arrived=0, waiting=[])

    def emit(self, kind: str, **data: Any) -> None:
        """Write an event down and tell everyone who asked."""
        self._emit(kind, data)

    def _emit(self, kind: str, data: dict[str, Any]) -> None:
        event = Event(kind, self.seconds, data)
        self._record.write(event)
        self.tally.add(event, self._batches)
        self._tell(event)
        if self._record.error is not None or self._record_failed:
            self._mind_the_record(self._record.error)

    def say(self, kind: str, **data: Any) -> None:
        """Tell everyone who asked of something that is no part of the training, and so not of the record."""
        self._tell(Event(kind, self.seconds, data))

    def _tell(self, event: Event) -> None:
        for callback in self.run.callbacks:
            if callback(event) is True and event.kind != "end":
                self.stop("callback")

    def _mind_the_record(self, error: OSError | None) -> None:
        if error is not None and not self._record_failed:
            self._record_failed = True
            self.emit(
                "warning",
                message=f"The record could not be written ({error}): training goes on without it, and checkpoints as far as "
                "there is room. Make room on the disk, and the record goes on, too.",
            )
        elif error is None and self._record_failed and not self._record_again:
            self._record_again = True
            self.emit("note", message="The record is written again.")

    @property
    def center(self) -> Center:
        """The center of the run, once there is one."""
        assert self._center is not None
        return self._center

    @property
    def clock(self) -> int:
        """Updates that the center has made."""
        return 0 if self._center is None else self._center.clock

    def epoch_at(self, samples: int) -> float:
        """So many rows in passes over the data."""
        return round(samples / self.plan.rows, 6)

    def stop(self, reason: str) -> None:
        """Ask for a clean stop; the first reason counts."""
        self.stopped = self.stopped or reason

    def _applied(self, commit: Commit) -> None:
        center = self._center
        assert center is not None
        told: dict[str, Any] = {"clock": center.state.clock, **COMMIT.record(commit)}
        told["epoch"] = self.epoch_at(self.tally.samples + commit.rows)
        told["live"] = len(center.live)
        if self._drawn:
            told["center"] = center.value.tolist()
        self._emit("commit", told)
        self.explosion.committed(commit.loss, center.state.clock, commit.lr)

    def _updated(self) -> None:
        leases = self.center.leases
        self.snapshots.updated(last=leases.used == leases.total)

    def _refused(self, commit: Commit, why: str) -> None:
        self.emit("refused", **COMMIT.record(commit), why=why, clock=self.clock)
        if why != "late":
            self.explosion.refused(self.clock)

    def _repeated(self, commit: Commit, arrived: int) -> None:
        whose = {"worker": commit.worker, "incarnation": commit.incarnation, "sequence": commit.sequence}
        self.emit("repeated", **whose, arrived=arrived)

    def _came(self, worker: int, arrived: int, incarnation: int | None) -> None:
        assert self._center is not None
        if incarnation is None:
            self.emit("leave", worker=worker, arrived=arrived)
            return
        taken = self._center.hands_state(worker)
        state = {} if taken is None else {"state": taken}
        self.emit("join", worker=worker, incarnation=incarnation, arrived=arrived, **state)

    # -- what is due ----------------------------------------------------------------------------------------

    def next_due(self) -> float:
        """Seconds until something is due."""
        times = [self._checkpoint_at]
        if self.run.stop.seconds is not None and self.time.began is not None and self.stopped is None:
            times.append(self.time.began + self.run.stop.seconds)
        return max(0.0, min(times) - time.monotonic())

    def attend(self) -> None:
        """Checkpoint and stop on the grid of time."""
        limit = math.inf if self.run.stop.seconds is None else self.run.stop.seconds
        if self.time.began is not None and self.time.elapsed >= limit:
            self.stop("seconds")
        if self._asked or time.monotonic() >= self._checkpoint_at:
            if self.waits_for_workers():
                self._checkpoint_at = time.monotonic() + POSTPONED
                return
            self._asked = False
            self.checkpoint()
            self._checkpoint_at = self._next_checkpoint()

    def waits_for_workers(self) -> bool:
        """Whether a checkpoint has to wait for what workers keep to themselves; nobody is waited for without end."""
        now, missing = time.monotonic(), self.missing()
        if missing:
            self._wanted_since = self._wanted_since or now
            if now - self._wanted_since > self._patience(missing):
                names = ", ".join(map(str, missing))
                tell = self.say if self.time.virtual else self.emit
                tell("warning", message=f"A checkpoint without the state of workers {names}: they have not committed in time.")
                missing = []
        if not missing:
            self._wanted_since = None
        self.announce(bool(missing))
        return bool(missing)

    def _patience(self, missing: list[int]) -> float:
        assert self._center is not None
        if self.stopped == "interrupted":
            return LAST
        speeds = [speed for speed in (self._center.ledger.speeds[worker] for worker in missing) if speed]
        return PATIENCE if self.time.virtual else max([PATIENCE, *(WINDOWS * self._center.scheme.window / s for s in speeds)])

    def ask_for_checkpoint(self) -> None:
        """From a signal: at the next opportunity."""
        self._asked = True

    # -- checkpoints ----------------------------------------------------------------------------------------

    def checkpoint(self, *, wait: bool = False) -> None:
        """Copy the center now; write it out beside the training (or wait for it)."""
        center = self._center
        if center is None:
            return
        self._finish_writing()
        if not center.is_sound():
            before = "there is none before it." if self.saved is None else f"go on from that of update {self.saved}."
            self.emit("note", message=f"No checkpoint is written of what diverged: {before}")
            return
        # What the checkpoint holds must be in the record first, or a kill in between would lose its rows from it.
        record = self._record.flush()
        snapshot = center.snapshot()
        waiting, pending = self.snapshots.state()
        everything = {
            "clock": center.clock,
            "center": snapshot.numbers.plain(),
            "tally": self.tally.state(),
            "seconds": self.seconds,
            "identity": self.identity,
            "waiting": [COMMIT.record(commit) for commit in center.round.commits],
            "pending": pending,
            "point": self.snapshots.at_point,
        }
        about = Written(center.clock, center.ledger.arrivals, center.without_state)
        self.checkpoints.write(about, snapshot.tensors() | waiting, everything, record)
        if wait:
            self._finish_writing()

    def memory(self) -> dict[str, Any]:
        """All that a checkpoint says in numbers, for an engine whose center can be started again; the record has it, too."""
        center = self._center
        assert center is not None
        self._record.flush()
        return {
            "clock": center.clock,
            "center": center.numbers(durable=True).plain(),
            "tally": self.tally.state(),
            "seconds": self.seconds,
            "identity": self.identity,
            "slots": list(center.scheme.center_slots),
        }

    def _finish_writing(self) -> None:
        written = self.checkpoints.finish()
        if written is None:
            return
        if written.sync_error is not None:
            self._mind_the_record(written.sync_error)
            self._record_again = True  # a later write that succeeds says nothing of what was lost here
        if written.error is not None:
            self.emit(
                "warning",
                message=f"Checkpoint {written.clock} could not be written ({written.error}); the one before it is kept.",
            )
            return
        self.saved = written.clock
        # When a checkpoint of a simulated run is written depends on the machine that it runs on.
        tell = self.say if self.time.virtual else self.emit
        without = {"without": written.without} if written.without else {}
        tell("checkpoint", clock=written.clock, path=f"checkpoints/{written.clock:010d}", arrived=written.arrived, **without)

    def close(self) -> None:
        """Write out what is left."""
        self.snapshots.finish()
        self._finish_writing()
        self._record.close()
        if self._center is None or self.saved == self._center.clock:
            for last in self.at_close:
                last()
