"""One run on any engine: its record, checkpoints, validation, and when to stop."""

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
from paragrad.rundir.checkpoint_writer import CheckpointWriter, Written
from paragrad.rundir.clock import RunClock
from paragrad.rundir.explosion import Explosion
from paragrad.rundir.record import Record
from paragrad.rundir.snapshots import Snapshots
from paragrad.rundir.tally import Tally
from paragrad.types import COMMIT, Commit, Event

POSTPONED = 0.05
"""Seconds between attempts to write a checkpoint that waits for workers."""
PATIENCE, WINDOWS = 30.0, 3
"""Longest wait of a checkpoint for the state of workers: seconds, or windows of the slowest if that is longer."""
LAST = 10.0
"""Longest wait in seconds if the run was interrupted."""


class Session:
    """One run. The engine reports events to it, and calls ``attend`` when something is due.

    ``held`` is the number of rows to validate on.
    """

    def __init__(self, directory: Path, run: Run, plan: Plan, *, identity: dict[str, Any], held: int = 0) -> None:
        self.directory = directory
        self.run = run
        self.plan = plan
        self.identity = identity
        self.tally = Tally()
        self.stopped: str | None = None
        self.interrupted_by: int = signal.SIGINT
        """First signal that asked the run to end."""
        self.interrupted_at: float | None = None
        """Time of that signal (monotonic)."""
        self.resumed: checkpoint.Checkpoint | None = None
        self.anew = False
        """True if the directory holds an earlier attempt that cannot be resumed."""
        self.settings: dict[str, Any] = {}
        """Contents of run.toml, for workers on other machines."""
        self.at_close: list[Callable[[], None]] = []
        """Functions of the engine, called at the end if the newest checkpoint holds the final center."""
        self.missing: Callable[[], list[int]] = list
        """Returns the workers whose state a checkpoint lacks; they send it with their next commits."""
        self.announce: Callable[[bool], None] = lambda wanted: None
        """Called with whether workers should send their state."""
        self._wanted_since: float | None = None
        self.measured: dict[str, Any] = {}
        """Figures that the engine adds to the summary."""
        self._center: Center | None = None
        self._drawn = False
        self.time = RunClock()
        """Clock of the run. If it is virtual, the record holds no real times."""
        self._samples_before = 0
        self.saved: int | None = None
        """Update of the newest checkpoint."""
        self._record = Record(directory / "record.jsonl")
        self._record_failed = False
        self._record_again = False
        self._checkpoint_at = math.inf
        self._requested = False
        self.checkpoints = CheckpointWriter(directory / "checkpoints")
        self.snapshots = Snapshots(self, held)
        self.explosion = Explosion(partial(self.emit, "warning"))

    # -- time -----------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Training time since the start barrier, including the time before a resume."""
        return self.time.seconds

    @property
    def rate(self) -> float:
        """Samples per second of real time; in virtual time, only since the last resume."""
        virtual = self.time.virtual
        samples = self.tally.samples - (self._samples_before if virtual else 0)
        seconds = self.time.wall_seconds if virtual else self.seconds
        return samples / seconds if seconds else 0.0

    def go(self) -> None:
        """Start the clock, when the start barrier has been passed."""
        self.time.go()
        self._checkpoint_at = self._next_checkpoint()
        self.emit("go")
        self.snapshots.begin()

    def _next_checkpoint(self) -> float:
        # In real time on every engine, because a crash costs real time.
        return math.inf if self.run.checkpoint_every is None else time.monotonic() + self.run.checkpoint_every

    # -- events ---------------------------------------------------------------------------------------------

    def attach(self, center: Center) -> None:
        """Observe this center, and restore it if the run is resumed."""
        self._center = center
        self._drawn = is_drawn(center.value.numel(), center.workers)
        center.applied = self._applied
        center.refused = self._refused
        center.repeated = self._repeated
        center.came = self._joined_or_left
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
            if presence is not None:  # only the process of the center was lost: the run continues where it was
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
        """Record an event and pass it to the callbacks."""
        event = Event(kind, self.seconds, data)
        self._record.write(event)
        self.tally.add(event, self.plan.batches)
        self._call_back(event)
        if self._record.error is not None or self._record_failed:
            self._check_record(self._record.error)

    def say(self, kind: str, **data: Any) -> None:
        """Pass an event to the callbacks only: it does not belong in the record, because it is not part of the training."""
        self._call_back(Event(kind, self.seconds, data))

    def _call_back(self, event: Event) -> None:
        for callback in self.run.callbacks:
            if callback(event) is True and event.kind != "end":
                self.stop("callback")

    def _check_record(self, error: OSError | None) -> None:
        if error is not None and not self._record_failed:
            self._record_failed = True
            self.emit(
                "warning",
                message=f"The record could not be written ({error}). Training continues without it, and checkpoints are "
                "written while there is room. Free disk space, and the record continues as well.",
            )
        elif error is None and self._record_failed and not self._record_again:
            self._record_again = True
            self.emit("note", message="The record is written again.")

    @property
    def center(self) -> Center:
        """Center of the run; only after ``attach``."""
        assert self._center is not None
        return self._center

    @property
    def clock(self) -> int:
        """Number of updates of the center."""
        return 0 if self._center is None else self._center.clock

    def epoch_at(self, samples: int) -> float:
        """Return a number of rows in passes over the data."""
        return round(samples / self.plan.rows, 6)

    def stop(self, reason: str) -> None:
        """Request a clean stop; the first reason counts."""
        self.stopped = self.stopped or reason

    def _applied(self, commit: Commit) -> None:
        center = self.center
        fields: dict[str, Any] = {"clock": center.state.clock, **COMMIT.record(commit)}
        fields["epoch"] = self.epoch_at(self.tally.samples + commit.rows)
        fields["live"] = len(center.live)
        if self._drawn:
            fields["center"] = center.value.tolist()
        self.emit("commit", **fields)
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

    def _joined_or_left(self, worker: int, arrived: int, incarnation: int | None) -> None:
        if incarnation is None:
            self.emit("leave", worker=worker, arrived=arrived)
            return
        taken = self.center.hands_state(worker)
        state = {} if taken is None else {"state": taken}
        self.emit("join", worker=worker, incarnation=incarnation, arrived=arrived, **state)

    # -- timing ---------------------------------------------------------------------------------------------

    def next_due(self) -> float:
        """Return the seconds until ``attend`` has something to do."""
        times = [self._checkpoint_at]
        if self.run.stop.seconds is not None and self.time.began is not None and self.stopped is None:
            times.append(self.time.began + self.run.stop.seconds)
        return max(0.0, min(times) - time.monotonic())

    def attend(self) -> None:
        """Write a checkpoint, or stop the run, if it is time for it."""
        limit = math.inf if self.run.stop.seconds is None else self.run.stop.seconds
        if self.time.began is not None and self.time.elapsed >= limit:
            self.stop("seconds")
        if self._requested or time.monotonic() >= self._checkpoint_at:
            if self.waits_for_workers():
                self._checkpoint_at = time.monotonic() + POSTPONED
                return
            self._requested = False
            self.checkpoint()
            self._checkpoint_at = self._next_checkpoint()

    def waits_for_workers(self) -> bool:
        """Return whether a checkpoint must wait for the private state of workers; the wait is limited."""
        now, missing = time.monotonic(), self.missing()
        if missing:
            self._wanted_since = self._wanted_since or now
            if now - self._wanted_since > self._patience(missing):
                names = ", ".join(map(str, missing))
                report = self.say if self.time.virtual else self.emit
                message = f"The checkpoint lacks the state of workers {names}, because they have not committed in time."
                report("warning", message=message)
                missing = []
        if not missing:
            self._wanted_since = None
        self.announce(bool(missing))
        return bool(missing)

    def _patience(self, missing: list[int]) -> float:
        if self.stopped == "interrupted":
            return LAST
        speeds = [speed for speed in (self.center.ledger.speeds[worker] for worker in missing) if speed]
        return PATIENCE if self.time.virtual else max([PATIENCE, *(WINDOWS * self.center.scheme.window / s for s in speeds)])

    def ask_for_checkpoint(self) -> None:
        """Request a checkpoint at the next opportunity; a signal handler may call it."""
        self._requested = True

    # -- checkpoints ----------------------------------------------------------------------------------------

    def checkpoint(self, *, wait: bool = False) -> None:
        """Copy the center now and write it in the background; ``wait``: until it is written."""
        center = self._center
        if center is None:
            return
        self._finish_writing()
        if not center.is_sound():
            before = "there is no earlier one." if self.saved is None else f"resume from that of update {self.saved}."
            self.emit("note", message=f"No checkpoint is written, because the center has diverged: {before}")
            return
        # The record must hold the commits before the checkpoint does, or a kill in between would lose their rows.
        record = self._record.flush()
        snapshot = center.snapshot()
        waiting, pending = self.snapshots.state()
        numbers = self._numbers(snapshot.numbers) | {
            "waiting": [COMMIT.record(commit) for commit in center.round.commits],
            "pending": pending,
            "point": self.snapshots.at_point,
        }
        about = Written(center.clock, center.ledger.arrivals, center.without_state)
        self.checkpoints.write(about, snapshot.tensors() | waiting, numbers, record)
        if wait:
            self._finish_writing()

    def memory(self) -> dict[str, Any]:
        """Return the numbers of a checkpoint for an engine that can restart its center; the record is flushed first."""
        self._record.flush()
        slots = {"slots": list(self.center.scheme.center_slots)}
        return self._numbers(self.center.numbers(durable=True)) | slots

    def _numbers(self, numbers: CenterNumbers) -> dict[str, Any]:
        return {
            "clock": self.center.clock,
            "center": numbers.plain(),
            "tally": self.tally.state(),
            "seconds": self.seconds,
            "identity": self.identity,
        }

    def _finish_writing(self) -> None:
        written = self.checkpoints.finish()
        if written is None:
            return
        if written.sync_error is not None:
            self._check_record(written.sync_error)
            self._record_again = True  # a later write that succeeds does not bring back the lines lost here
        if written.error is not None:
            self.emit(
                "warning",
                message=f"Checkpoint {written.clock} could not be written ({written.error}); the one before it is kept.",
            )
            return
        self.saved = written.clock
        # The record of a simulated run must not depend on the real time at which a checkpoint was written.
        report = self.say if self.time.virtual else self.emit
        without = {"without": written.without} if written.without else {}
        report("checkpoint", clock=written.clock, path=f"checkpoints/{written.clock:010d}", arrived=written.arrived, **without)

    def close(self) -> None:
        """Finish all writes, and call ``at_close`` if the newest checkpoint holds the final center."""
        self.snapshots.finish()
        self._finish_writing()
        self._record.close()
        if self._center is None or self.saved == self._center.clock:
            for last in self.at_close:
                last()
