"""Launchers start worker processes, on this machine or on a cluster."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol, runtime_checkable

from paragrad.engines.process import forkserver
from paragrad.engines.process.forkserver import Fd
from paragrad.engines.process.notes import Notes
from paragrad.engines.process.payload import Memfd, Storage
from paragrad.engines.process.task import Task, run_forked


class Process(Protocol):
    """A process that a launcher has started."""

    @property
    def pid(self) -> int | None:
        """Process id on this machine; None if it runs on another one."""

    @property
    def sentinel(self) -> int | None:
        """Descriptor that becomes readable when the process has ended; None if ``on_exit`` is called instead."""

    @property
    def exitcode(self) -> int | None:
        """Exit status, or minus the number of the signal that ended it; None while it runs or if it is unknown."""

    @property
    def lost(self) -> str | None:
        """Reason if it ended through no fault of its own, such as a lost node; otherwise None."""

    def is_alive(self) -> bool:
        """Return whether the process still runs, as far as is known."""

    def kill(self) -> None:
        """End the process at once. Must not block forever, and may be called twice."""

    def join(self) -> None:
        """Wait until it has ended. Must not block forever after ``kill``, and may be called twice."""


@runtime_checkable
class Launcher(Protocol):
    """Starts worker processes of a run."""

    def storage(self, directory: Path) -> Storage:
        """Return storage for the job that the started processes can read; ``directory`` is the run directory."""

    def start(self, task: Task, on_exit: Callable[[], None]) -> Process:
        """Start a process that calls ``task.run()``. ``on_exit`` is called, from any thread, when it has ended."""

    def close(self) -> None:
        """End all started processes."""


@dataclass
class ForkedProcess:
    """A child of this process. It sends notes (warnings, an exception's traceback) over a pipe."""

    process: BaseProcess
    notes: Notes
    lost: str | None = None

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def sentinel(self) -> int:
        return self.process.sentinel

    @property
    def exitcode(self) -> int | None:
        return self.process.exitcode

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def join(self) -> None:
        self.process.join()


class Forks:
    """Children of this process, from a fork server that has torch loaded: the default launcher."""

    def storage(self, directory: Path) -> Storage:
        return Memfd()

    def start(self, task: Task, on_exit: Callable[[], None] = lambda: None) -> ForkedProcess:
        """Start a child with its own log; it has a sentinel, so ``on_exit`` is not called."""
        log = task.directory / "logs" / f"{task.name}.log"
        log.parent.mkdir(exist_ok=True)
        notes = Notes()
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        process = forkserver.start(run_forked, task, Fd(notes.write_end), Fd(fd), name=f"paragrad-{task.name}")
        os.close(fd)
        notes.seal()
        return ForkedProcess(process, notes)

    def close(self) -> None:
        """Do nothing: ``Children`` ends the processes."""


def describe_exit(process: Process) -> str:
    """Return in words how a process ended."""
    code = process.exitcode
    if process.lost is not None:
        return f"was lost ({process.lost})"
    if code is None:
        return "is still running" if process.is_alive() else "ended"
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was ended by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"


def is_stopped(process: Process) -> bool:
    """Return whether a process of this machine was stopped by a signal (SIGSTOP, a debugger)."""
    if process.pid is None:
        return False
    try:
        with open(f"/proc/{process.pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "Tt"
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return False
