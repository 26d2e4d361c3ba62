"""What happens around the exchange, on any engine: the record, checkpoints, validation, and when to stop."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from paragrad import checkpoint
from paragrad.center import Center
from paragrad.data.plan import Plan
from paragrad.record import Record, fold
from paragrad.run import Run
from paragrad.tally import Tally
from paragrad.types import Commit, Event

EVALUATION_SHARE = 10
"""Validation takes at most about one part in this many of the time."""


class Session:
    """One run as it happens. The engine tells it what happens, and asks it what is due."""

    def __init__(self, directory: Path, run: Run, plan: Plan, *, identity: dict[str, Any]) -> None:
        self.directory = directory
        self.run = run
        self.plan = plan
        self.identity = identity
        self.tally = Tally()
        self.stopped: str | None = None
        self.resumed: checkpoint.Checkpoint | None = None
        self.anew = False
        """Whether the directory holds an earlier attempt of which nothing can be used."""
        self._center: Center | None = None
        self._before = 0.0
        self._began: float | None = None
        self._ended: float | None = None
        self.saved: int | None = None
        """The update that the newest checkpoint is of."""
        self._record = Record(directory / "record.jsonl")
        self._record_failed = False
        self._record_again = False
        self._checkpoint_at = math.inf
        self._validate_at = math.inf
        self._best = math.inf
        self._no_better = 0
        self._writer: threading.Thread | None = None
        self._write_error: str | None = None
        self._sync_error: OSError | None = None

    # -- time -----------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Training time so far, from the start barrier on, that before a resume included."""
        if self._began is None:
            return self._before
        return self._before + (self._ended or time.monotonic()) - self._began

    def go(self) -> None:
        """The start barrier has been passed: the clock runs."""
        self._began = time.monotonic()
        self._checkpoint_at = self._after(self.run.checkpoint_every)
        self._validate_at = self._after(self.run.validate_every)
        self.emit("go")

    def end(self) -> None:
        """The last commit has been applied: the clock stands."""
        if self._ended is None:
            self._ended = time.monotonic()

    def _after(self, seconds: float | None) -> float:
        return math.inf if seconds is None else time.monotonic() + seconds

    # -- what happens ---------------------------------------------------------------------------------------

    def attach(self, center: Center) -> None:
        """Watch this center, and bring it to where a resumed run left off."""
        self._center = center
        center.applied = self._applied
        center.refused = self._refused
        if self.resumed is not None:
            numbers = dict(self.resumed.numbers["center"])
            numbers["leases"] = {**numbers["leases"], "epochs": self.plan.epochs}
            center.restore(self.resumed.tensors, numbers)
            self.saved = center.clock
            self.tally = Tally.from_state(self.resumed.numbers["tally"])
            self._before = self.resumed.numbers["seconds"]
            self.emit("resume", clock=center.clock, path=self.resumed.path.name, rows=self.tally.samples)
        elif self.anew:
            self.emit("resume", clock=0, path=None, rows=0)

    def emit(self, kind: str, **data: Any) -> None:
        """Write an event down and tell everyone who asked."""
        event = Event(kind, self.seconds, data)
        self._record.write(event)
        self.tally.add(event, self.plan.batches)
        for callback in self.run.callbacks:
            if callback(event) is True and kind != "end":
                self.stop("callback")
        self._mind_the_record(self._record.error)

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

    def stop(self, reason: str) -> None:
        """Ask for a clean stop; the first reason counts."""
        self.stopped = self.stopped or reason

    def _applied(self, commit: Commit) -> None:
        assert self._center is not None
        self.emit(
            "commit",
            clock=self._center.clock,
            worker=commit.worker,
            incarnation=commit.incarnation,
            sequence=commit.sequence,
            version=commit.version,
            staleness=commit.staleness,
            steps=commit.steps,
            rows=commit.rows,
            loss=round(commit.loss, 6) if math.isfinite(commit.loss) else None,
            seconds=round(commit.seconds, 6),
            batches=fold(commit.batches),
        )

    def _refused(self, commit: Commit, why: str) -> None:
        self.emit("refused", worker=commit.worker, sequence=commit.sequence, steps=commit.steps, why=why)

    # -- what is due ----------------------------------------------------------------------------------------

    def next_due(self) -> float:
        """Seconds until something is due."""
        times = [self._checkpoint_at, self._validate_at]
        if self.run.stop.seconds is not None and self._began is not None:
            times.append(self._began + self.run.stop.seconds)
        return max(0.0, min(times) - time.monotonic())

    def attend(self) -> None:
        """Checkpoint and stop on the grid of time."""
        now = time.monotonic()
        if self.run.stop.seconds is not None and self._began is not None and now - self._began >= self.run.stop.seconds:
            self.stop("seconds")
        if now >= self._checkpoint_at:
            self.checkpoint()
            self._checkpoint_at = self._after(self.run.checkpoint_every)

    def validation_due(self) -> bool:
        """Whether it is time to look at the center; the next time is set by ``validated``."""
        if time.monotonic() < self._validate_at:
            return False
        self._validate_at = math.inf
        return True

    def validated(self, found: dict[str, float], clock: int, seconds: float, *, last: bool = False) -> None:
        """The center was looked at."""
        if self.run.validate_every is not None:
            self._validate_at = self._after(max(self.run.validate_every, EVALUATION_SHARE * seconds))
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
        self._validate_at = self._after(self.run.validate_every)

    # -- checkpoints ----------------------------------------------------------------------------------------

    def checkpoint(self, *, wait: bool = False) -> None:
        """Copy the center now; write it out beside the training (or wait for it)."""
        center = self._center
        if center is None:
            return
        self._finish_writing()
        # What the checkpoint holds must be in the record first, or a kill in between would lose its rows from it.
        record = self._record.flush()
        tensors, numbers = center.snapshot()
        everything = {
            "clock": center.clock,
            "center": numbers,
            "tally": self.tally.state(),
            "seconds": self.seconds,
            "identity": self.identity,
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
        self._writing = center.clock
        self._writer.start()
        if wait:
            self._finish_writing()

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
            self.emit("checkpoint", clock=self._writing, path=f"checkpoints/{self._writing:010d}")

    def close(self) -> None:
        """Write out what is left."""
        self._finish_writing()
        self._record.close()
