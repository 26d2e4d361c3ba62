"""What a started process does: a job, and the role that the process plays in it."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from paragrad.core.job import Job
from paragrad.data.source import Reporting
from paragrad.engines.process.forkserver import Fd
from paragrad.engines.process.payload import Payload
from paragrad.errors import UsageError

KEPT_BLOCK = 64 << 20
"""Largest block in bytes that malloc keeps when it is freed; larger ones, kept, would add up to many times a large layer."""


class Report(Protocol):
    """Where a process says what its parent, or the user, should know."""

    carries_errors: bool
    """Whether the exception that ends the process is reported, too."""

    def __call__(self, kind: str, what: Any) -> None:
        """Report a ``warning`` (a text), or what a role has found."""


class Role(Protocol):
    """The part that a process plays: a worker, the validator, the reader of rows, a shard."""

    def __call__(self, job: Job, report: Report) -> None:
        """Play it until there is nothing left to do."""


@dataclass(frozen=True)
class Task:
    """All that a started process needs. It travels by pickle over a channel that only the user's own processes can read."""

    name: str
    """Name of the process and of its log."""
    payload: Payload
    role: Role
    directory: Path
    """Run directory, as the center's machine knows it."""
    threads: int = 1

    def run(self, report: Report | None = None) -> None:
        """Do it, in the process that was started for it. Raises what goes wrong."""
        report = report or _Printed()
        _keep_heap()
        torch.set_num_threads(self.threads)
        job = self.payload.open()
        assert isinstance(job, Job)
        for source in (job.train, job.validation):
            if isinstance(source, Reporting):
                source.report = _warns(report)
        self.role(job, report)


def run_forked(task: Task, notes: Fd, log: Fd) -> None:
    """Run a task in a child: output goes to its log; an exception is reported to the parent before it exits with status 1."""
    os.dup2(log.open(), 1)
    os.dup2(log.open(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    report = _Noted(notes)
    try:
        task.run(report)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        text = traceback.format_exc()
        print(text, file=sys.stderr)
        report("error", {"text": text, "usage": str(error) if isinstance(error, UsageError) else None})
        sys.stderr.flush()
        os._exit(1)


class _Noted:
    """Reports to the parent, over a pipe."""

    carries_errors = True

    def __init__(self, notes: Fd) -> None:
        self._notes = notes

    def __call__(self, kind: str, what: Any) -> None:
        data = json.dumps({kind: what}).encode() + b"\n"
        while data:
            data = data[os.write(self._notes.open(), data) :]


class _Printed:
    """Reports in the log of a process that has no pipe to its launcher."""

    carries_errors = False

    def __call__(self, kind: str, what: Any) -> None:
        print(f"{kind}: {what}", flush=True)


def _warns(report: Report) -> Callable[[str], None]:
    return lambda message: report("warning", message)


def _keep_heap() -> None:
    """Let malloc keep freed blocks: by default it gives large ones back, and every step faults them in again."""
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, KEPT_BLOCK)
        mallopt(m_trim_threshold, (1 << 31) - 1)
