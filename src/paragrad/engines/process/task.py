"""The task of a started process: a job, and the role of the process in it."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from paragrad.core.job import Job
from paragrad.data.source import Reporting
from paragrad.engines.process.forkserver import Fd
from paragrad.engines.process.payload import Payload
from paragrad.errors import UsageError

KEPT_BLOCK = 64 << 20
"""Largest freed block in bytes that malloc keeps; kept larger ones would add up to many times a large layer."""


class Report(Protocol):
    """Reports from a process to its parent or the user."""

    carries_errors: bool
    """True if the exception that ends the process is reported, too."""

    def __call__(self, kind: str, what: Any) -> None:
        """Report a ``warning`` (a string), or a result of the role."""


class Role(Protocol):
    """The role of a process: a worker, the validator, the reader of rows, a shard."""

    def __call__(self, job: Job, report: Report) -> None:
        """Run until there is nothing left to do."""


@dataclass(frozen=True)
class Task:
    """Everything a started process needs. It is pickled over a channel that only the user's own processes can read."""

    name: str
    """Name of the process and of its log."""
    payload: Payload
    role: Role
    directory: Path
    """Run directory, as the center's machine knows it."""
    threads: int = 1

    def run(self, report: Report | None = None) -> None:
        """Run the role in the started process. Exceptions are not caught."""
        report = report or _Printed()
        _keep_heap()
        torch.set_num_threads(self.threads)
        job = self.payload.open()
        assert isinstance(job, Job)
        for source in (job.train, job.validation):
            if isinstance(source, Reporting):
                source.report = partial(report, "warning")
        self.role(job, report)


def run_forked(task: Task, notes: Fd, log: Fd) -> None:
    """Run a task in a child. Its output goes to its log; an exception is reported to the parent, and the child exits with 1."""
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


def _keep_heap() -> None:
    """Let malloc keep freed blocks: by default it returns large ones, and every step causes page faults again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, KEPT_BLOCK)
        mallopt(m_trim_threshold, (1 << 31) - 1)
