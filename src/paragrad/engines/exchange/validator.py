"""The process that validates snapshots of the center, one after another, while training continues."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from paragrad.core.job import Job
from paragrad.engines.process.children import Child, OnExit, OnNote
from paragrad.engines.process.forkserver import Fd
from paragrad.engines.process.launcher import describe_exit
from paragrad.engines.process.segment import Layout, Segment
from paragrad.engines.process.task import Report, Role
from paragrad.errors import WorkerError
from paragrad.learners.learner import Reports
from paragrad.rundir.grid import fill

if TYPE_CHECKING:
    from paragrad.rundir.snapshots import Snapshots

DEATHS = 3
"""Deaths of the process after which it skips a snapshot."""
TICK = 500
"""Milliseconds between checks for an interrupt while waiting."""


@dataclass(frozen=True)
class Validates:
    """The role of the validating process: validate the snapshot in the segment whenever the doorbell rings."""

    segment: Fd
    layout: Layout
    doorbell: Fd
    device: str

    def __call__(self, job: Job, report: Report) -> None:
        learner = job.make_learner(self.device)
        if isinstance(learner, Reports):
            learner.report = cache(lambda message: report("warning", message))  # each message once
        segment = Segment(self.segment.open(), self.layout)
        assert job.validation is not None
        while True:
            os.eventfd_read(self.doorbell.open())
            fill({name: segment.tensor(name) for name in self.layout}, learner.weights, learner.buffers, learner.integers)
            report("found", learner.evaluate(job.validation, job.evaluation_batch))


Start: TypeAlias = Callable[[Role, OnExit, OnNote], Child]
"""Starts a process, with functions to call when it ends and when it reports something."""


class Validator:
    """Starts the validating process when there is a snapshot to validate, and again if it was killed."""

    def __init__(self, snapshots: Snapshots, start: Start, device: str, emit: Callable[..., None]) -> None:
        self.snapshots = snapshots
        self.child: Child | None = None
        self._start = start
        self._device = device
        self._emit = emit
        self._doorbell = os.eventfd(0, os.EFD_CLOEXEC)
        self._segment: Segment | None = None
        self._busy = False
        self._deaths = 0

    def attend(self) -> None:
        """Hand over the next snapshot, if there is one and the process is idle."""
        if self._busy or not self.snapshots.waiting:
            return
        snapshot = self.snapshots.waiting[0]
        if self._segment is None:
            self._segment = Segment()
            for name, tensor in snapshot.tensors.items():
                self._segment.allocate(name, tensor.numel(), tensor.dtype)
        fill(snapshot.tensors, *map(self._segment.tensor, ("value", "buffers", "integers")))
        if self.child is None:
            role = Validates(Fd(self._segment.fd), self._segment.layout, Fd(self._doorbell), self._device)
            self.child = self._start(role, self._on_exit, self._on_note)
        os.eventfd_write(self._doorbell, 1)
        self._busy = True

    def _on_note(self, kind: str, what: Any) -> None:
        if kind == "warning":
            self._emit("warning", message=what)
            return
        self._busy, self._deaths = False, 0
        if self.snapshots.waiting:  # otherwise validation has ended the run
            self.snapshots.validated(what)

    def _on_exit(self, child: Child) -> None:
        self.child = None
        if child.error is not None:
            raise WorkerError(-1, f"validation raised an exception.\n\n{child.error['text']}")
        if not self._busy:
            return
        why = describe_exit(child.process)
        self._busy, self._deaths = False, self._deaths + 1
        if self._deaths < DEATHS:
            self._emit("warning", message=f"The validating process {why}; it is started again.")
        elif self.snapshots.waiting:
            self._deaths, clock = 0, self.snapshots.waiting[0].clock
            self._emit("warning", message=f"The validating process {why} {DEATHS} times: update {clock} is not validated.")
            self.snapshots.give_up()

    def wait(self, end: OnExit) -> None:
        """Wait for a report from the process; call ``end`` if the process has ended."""
        self.attend()
        child = self.child
        if child is None:
            return
        assert child.notes is not None
        assert child.process.sentinel is not None
        ready = select.poll()
        ready.register(child.notes.fd, select.POLLIN)
        ready.register(child.process.sentinel, select.POLLIN)
        for fd, _ in ready.poll(TICK):
            child.read_notes()
            if fd == child.process.sentinel and self.child is child:
                end(child)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._doorbell)
        if self._segment is not None:
            self._segment.close()
