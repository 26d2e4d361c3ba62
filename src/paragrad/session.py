"""What happens around the exchange, on any engine: the record, checkpoints, validation, and when to stop."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paragrad import checkpoint
from paragrad.center import Center
from paragrad.data.plan import Plan
from paragrad.record import Record, fold, read
from paragrad.run import Run, Watches
from paragrad.tally import Tally
from paragrad.types import Commit, Event
from paragrad.worker import is_drawn

EVALUATION_SHARE = 10
"""Validation takes at most about one part in this many of the time."""
POSTPONED = 0.05
"""Seconds after which it is tried again whether a checkpoint that is due may be written."""


class Session:
    """One run as it happens. The engine tells it what happens, and asks it what is due."""

    def __init__(self, directory: Path, run: Run, plan: Plan, *, identity: dict[str, Any]) -> None:
        self.directory = directory
        self.run = run
        self.plan = plan
        self._batches = plan.batches
        self.identity = identity
        self.tally = Tally()
        self.stopped: str | None = None
        self.interrupted_at: float | None = None
        """When it was first asked for by a signal (monotonic)."""
        self.resumed: checkpoint.Checkpoint | None = None
        self.anew = False
        """Whether the directory holds an earlier attempt of which nothing can be used."""
        self.settings: dict[str, Any] = {}
        """What run.toml says: for workers elsewhere."""
        self.at_close: list[Callable[[], None]] = []
        """What an engine wants done once the newest checkpoint holds the center as it is."""
        self.is_ready_to_checkpoint: Callable[[], bool] = lambda: True
        """Asked when one is due; an engine may have to wait for something that belongs into it."""
        self.measured: dict[str, Any] = {}
        """What the engine has to add to the summary."""
        self._center: Center | None = None
        self._drawn = False
        self._now: Callable[[], float] = time.monotonic
        self.virtual = False
        """Whether the run's seconds are those of a simulated cluster: the record then holds nothing of the wall's clock."""
        self._before = 0.0
        self._samples_before = 0
        self._began: float | None = None
        self._ended: float | None = None
        self._wall_began: float | None = None
        self._wall_ended: float | None = None
        self.saved: int | None = None
        """The update that the newest checkpoint is of."""
        self._record = Record(directory / "record.jsonl")
        self._record_failed = False
        self._record_again = False
        self._checkpoint_at = math.inf
        self._asked = False
        self._validate_at = math.inf
        self._validate_rows = 0
        self.rows_between_looks = 0
        """Rows that are trained on between two validations, at least: what bounds their share of a simulated run."""
        self._best = math.inf
        self._no_better = 0
        self._writer: threading.Thread | None = None
        self._writing, self._writing_arrived = 0, 0
        self._write_error: str | None = None
        self._sync_error: OSError | None = None

    # -- time -----------------------------------------------------------------------------------------------

    def use_clock(self, now: Callable[[], float]) -> None:
        """Let the run's seconds be those of a simulated cluster. Checkpoints keep to the wall's clock."""
        self._now, self.virtual = now, True

    @property
    def seconds(self) -> float:
        """Training time so far, from the start barrier on, that before a resume included."""
        if self._began is None:
            return self._before
        return self._before + (self._now() if self._ended is None else self._ended) - self._began

    @property
    def wall_seconds(self) -> float:
        """The same by the wall's clock, since the last start or resume."""
        if self._wall_began is None:
            return 0.0
        return (time.monotonic() if self._wall_ended is None else self._wall_ended) - self._wall_began

    @property
    def rate(self) -> float:
        """Samples a second by the wall's clock; where that is the run's own, that before a resume included."""
        samples = self.tally.samples - (self._samples_before if self.virtual else 0)
        seconds = self.wall_seconds if self.virtual else self.seconds
        return samples / seconds if seconds else 0.0

    def go(self) -> None:
        """The start barrier has been passed: the clock runs."""
        self._wall_began = time.monotonic()
        self._began = self._now()
        self._checkpoint_at = self._next_checkpoint()
        self._validate_at = self._next_look(0.0)
        self.emit("go")

    def end(self) -> None:
        """The last commit has been applied: the clock stands."""
        if self._ended is None:
            self._ended, self._wall_ended = self._now(), time.monotonic()

    def _next_checkpoint(self) -> float:
        """By the wall's clock, on every engine: what a crash may cost is real time."""
        return math.inf if self.run.checkpoint_every is None else time.monotonic() + self.run.checkpoint_every

    def _next_look(self, cost: float) -> float:
        if self.run.validate_every is None:
            return math.inf
        self._validate_rows = self.tally.samples + self.rows_between_looks
        return self._now() + max(self.run.validate_every, EVALUATION_SHARE * cost)

    # -- what happens ---------------------------------------------------------------------------------------

    def attach(self, center: Center) -> None:
        """Watch this center, and bring it to where a resumed run left off."""
        self._center = center
        self._drawn = is_drawn(center.value.numel(), center.workers)
        center.applied = self._applied
        center.refused = self._refused
        center.repeated = self._repeated
        center.came = self._came
        for callback in self.run.callbacks:
            if isinstance(callback, Watches):
                callback.watch(center)
        if self.resumed is not None:
            numbers = dict(self.resumed.numbers["center"])
            numbers["leases"] = {**numbers["leases"], "epochs": self.plan.epochs}
            center.restore(self.resumed.tensors, numbers)
            self.saved = None if "present" in numbers else center.clock
            self.tally = Tally.from_state(self.resumed.numbers["tally"])
            self._samples_before = self.tally.samples
            self._before = self.resumed.numbers["seconds"]
            if "present" in numbers:  # nothing was lost but the process: all goes on where it was
                self.tally.validations = [{"time": e.time, **e.data} for e in read(self.directory) if e.kind == "validation"]
                present = numbers["present"]
                self.emit(
                    "restart",
                    clock=center.clock,
                    arrived=center.arrivals,
                    forgotten=present["forgotten"],
                    again=sum(len(batches) for _, batches in present["gone_on"]),
                )
                return
            self.emit(
                "resume",
                clock=center.clock,
                path=self.resumed.path.name,
                rows=self.tally.samples,
                arrived=center.arrivals,
                waiting=self.resumed.numbers.get("waiting", []),
            )
        elif self.anew:
            self.emit("resume", clock=0, path=None, rows=0, arrived=0, waiting=[])

    def emit(self, kind: str, **data: Any) -> None:
        """Write an event down and tell everyone who asked."""
        self._emit(kind, data)

    def _emit(self, kind: str, data: dict[str, Any]) -> None:
        event = Event(kind, self.seconds, data)
        self._record.write(event)
        self.tally.add(event, self._batches)
        if self.run.callbacks:
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
            self._warn(
                f"The record could not be written ({error}): training goes on without it, and checkpoints as far as there is "
                "room. Make room on the disk, and the record goes on, too."
            )
        elif error is None and self._record_failed and not self._record_again:
            self._record_again = True
            self.emit("note", message="The record is written again.")

    def _warn(self, message: str) -> None:
        """Something could not be written. Where no callback listens, nobody would hear of it but for stderr."""
        if not self.run.callbacks:
            print(f"WARNING: {message}", file=sys.stderr, flush=True)
        self.emit("warning", message=message)

    @property
    def clock(self) -> int:
        """Updates that the center has made."""
        return 0 if self._center is None else self._center.clock

    def stop(self, reason: str) -> None:
        """Ask for a clean stop; the first reason counts."""
        self.stopped = self.stopped or reason

    def _applied(self, commit: Commit) -> None:
        center = self._center
        assert center is not None
        told: dict[str, Any] = {"clock": center.state.clock}
        _tell(told, commit)
        told["staleness"] = commit.staleness
        told["rows"] = commit.rows
        told["loss"] = round(commit.loss, 6) if math.isfinite(commit.loss) else None
        told["seconds"] = commit.seconds  # to the last digit: what a scheme makes of workers' speeds can then be made again
        told["live"] = len(center.live)
        if math.isfinite(commit.distance):
            told["distance"] = float(f"{commit.distance:.6g}")
        if commit.path is not None:
            told["path"] = [list(point) for point in commit.path]
        if self._drawn:
            told["center"] = center.value.tolist()
        self._emit("commit", told)

    def _refused(self, commit: Commit, why: str) -> None:
        self.emit(
            "refused",
            **_told(commit),
            why=why,
            clock=self.clock,
        )

    def _repeated(self, commit: Commit, arrived: int) -> None:
        whose = {"worker": commit.worker, "incarnation": commit.incarnation, "sequence": commit.sequence}
        self.emit("repeated", **whose, arrived=arrived)

    def _came(self, worker: int, arrived: int, incarnation: int | None) -> None:
        if incarnation is None:
            self.emit("leave", worker=worker, arrived=arrived)
        else:
            self.emit("join", worker=worker, incarnation=incarnation, arrived=arrived)

    # -- what is due ----------------------------------------------------------------------------------------

    def next_due(self) -> float:
        """Seconds until something is due."""
        times = [self._checkpoint_at, self._validate_at]
        if self.run.stop.seconds is not None and self._began is not None:
            times.append(self._began + self.run.stop.seconds)
        return max(0.0, min(times) - time.monotonic())

    def attend(self) -> None:
        """Checkpoint and stop on the grid of time."""
        limit = math.inf if self.run.stop.seconds is None else self.run.stop.seconds
        if self._began is not None and self._now() - self._began >= limit:
            self.stop("seconds")
        if self._asked or time.monotonic() >= self._checkpoint_at:
            if not self.is_ready_to_checkpoint():
                self._checkpoint_at = time.monotonic() + POSTPONED
                return
            self._asked = False
            self.checkpoint()
            self._checkpoint_at = self._next_checkpoint()

    def ask_for_checkpoint(self) -> None:
        """From a signal: at the next opportunity."""
        self._asked = True

    def validation_due(self) -> bool:
        """Whether it is time to look at the center; the next time is set by ``validated``."""
        if self._now() < self._validate_at or self.tally.samples < self._validate_rows:
            return False
        self._validate_at = math.inf
        return True

    def validated(self, found: dict[str, float], clock: int, seconds: float, *, last: bool = False) -> None:
        """The center was looked at."""
        self._validate_at = self._next_look(seconds)
        self.emit("validation", clock=clock, **{k: round(v, 6) for k, v in found.items()})
        if last:
            return
        stop = self.run.stop
        if stop.accuracy is not None and found.get("accuracy", -math.inf) >= stop.accuracy:
            self.stop("target")
        if stop.loss is not None and found["loss"] <= stop.loss:
            self.stop("target")
        if found["loss"] < self._best:
            self._best, self._no_better = found["loss"], 0
        else:
            self._no_better += 1
            if stop.patience is not None and self._no_better >= stop.patience:
                self.stop("patience")

    def skip_validation(self) -> None:
        """A validation came to nothing: try again when the next is due."""
        self._validate_at = self._next_look(0.0)

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
        tensors, numbers = center.snapshot()
        everything = {
            "clock": center.clock,
            "center": numbers,
            "tally": self.tally.state(),
            "seconds": self.seconds,
            "identity": self.identity,
            "waiting": [_told(commit) for commit in center.waiting],
        }

        def write() -> None:
            try:
                os.fsync(record)
            except OSError as error:
                self._sync_error = error
            try:
                checkpoint.save(self.directory / "checkpoints", tensors, everything)
                self._write_error = None
            except OSError as error:
                self._write_error = f"{type(error).__name__}: {error}"

        self._write_error = "its writer failed"  # until it says otherwise: what was not seen to be written is not announced
        self._writer = threading.Thread(target=write, name="checkpoint")
        self._writing, self._writing_arrived = center.clock, center.arrivals
        self._writer.start()
        if wait:
            self._finish_writing()

    def memory(self) -> dict[str, Any]:
        """All that a checkpoint says in numbers, for an engine whose center can be started again; the record has it, too."""
        center = self._center
        assert center is not None
        self._record.flush()
        return {
            "clock": center.clock,
            "center": center.memory(),
            "tally": {**self.tally.state(), "validations": []},
            "seconds": self.seconds,
            "identity": self.identity,
            "slots": list(center.scheme.center_slots),
        }

    def _finish_writing(self) -> None:
        if self._writer is None:
            return
        self._writer.join()
        self._writer = None
        if self._sync_error is not None:
            self._mind_the_record(self._sync_error)
            self._record_again = True  # a later write that succeeds says nothing of what was lost here
            self._sync_error = None
        if self._write_error is not None:
            error, self._write_error = self._write_error, None
            self._warn(f"Checkpoint {self._writing} could not be written ({error}); the one before it is kept.")
        else:
            self.saved = self._writing
            path = f"checkpoints/{self._writing:010d}"
            # When a simulated run is written is a matter of the machine that it runs on.
            tell = self.say if self.virtual else self.emit
            tell("checkpoint", clock=self._writing, path=path, arrived=self._writing_arrived)

    def close(self) -> None:
        """Write out what is left."""
        self._finish_writing()
        self._record.close()
        if self._center is None or self.saved == self._center.clock:
            for last in self.at_close:
                last()


def _told(commit: Commit) -> dict[str, Any]:
    """What is needed to make a commit again: who made it, of what, from which center, and when it came."""
    told: dict[str, Any] = {}
    _tell(told, commit)
    return told


def _tell(told: dict[str, Any], commit: Commit) -> None:
    told["worker"] = commit.worker
    told["incarnation"] = commit.incarnation
    told["sequence"] = commit.sequence
    told["version"] = commit.version
    told["steps"] = commit.steps
    told["batches"] = fold(commit.batches)
    told["arrived"] = commit.arrived
    if commit.saw != commit.version:
        told["saw"] = commit.saw
    if commit.pulls:
        told["pulls"] = list(commit.pulls)
    if commit.coded_bytes is not None:
        told["bytes"] = commit.coded_bytes
