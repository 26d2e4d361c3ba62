"""Starts child processes and watches them: reads their notes and handles their exit."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from paragrad.engines.process.launcher import Forks, Launcher, Process, is_stopped
from paragrad.engines.process.notes import Notes
from paragrad.engines.process.task import Task


class Poller:
    """Waits for descriptors and calls a function for each one that is readable."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._calls: dict[int, Callable[[], None]] = {}

    def add(self, fd: int, call: Callable[[], None]) -> None:
        """Call a function whenever the descriptor is readable."""
        self._calls[fd] = call
        self._poll.register(fd, select.POLLIN)

    def drop(self, fd: int) -> None:
        """Stop waiting for a descriptor, if it was added."""
        if self._calls.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def wait(self, seconds: float) -> None:
        """Wait for at most this long, and call the functions of readable descriptors."""
        due = [(fd, self._calls.get(fd)) for fd, _ in self._poll.poll(max(1, seconds * 1000))]
        for fd, call in due:
            # A call may close another descriptor, and a new process may get the same number.
            if call is not None and self._calls.get(fd) is call:
                call()


@dataclass(eq=False)
class Child:
    """One started process and its state."""

    process: Process
    task: Task
    incarnation: int = 0
    error: dict[str, Any] | None = None
    """The exception that ended it: its ``text``, and the message of a ``usage`` error if it was one."""
    stopped_at: float | None = None
    """Time (monotonic) when it was found stopped by a signal."""
    ended: bool = False
    _on_exit: OnExit = field(default=lambda child: None, repr=False)
    _on_note: OnNote = field(default=lambda kind, what: None, repr=False)

    @property
    def notes(self) -> Notes | None:
        """The pipe of its notes; None if it is not a child of this process."""
        return getattr(self.process, "notes", None)

    def read_notes(self) -> None:
        """Handle the notes that have arrived."""
        for message in [] if self.notes is None else self.notes.read():
            for kind, what in message.items():
                if kind == "error":
                    self.error = what
                else:
                    self._on_note(kind, what)


OnExit: TypeAlias = Callable[[Child], None]
OnNote: TypeAlias = Callable[[str, Any], None]
"""Called with the kind and the content of a note."""


@dataclass
class _Exit:
    """Exit of a launcher's process, which may be reported before its ``Child`` exists."""

    child: Child | None = None
    reported: bool = False


class Children:
    """Starts processes and watches them. One thread calls all methods, except for a launcher's report of an exit."""

    def __init__(self, poller: Poller, wake: Callable[[], None]) -> None:
        """``wake`` ends a wait of the poller; it is called from any thread."""
        self._poller = poller
        self._wake = wake
        self._forks = Forks()
        self._lock = threading.Lock()
        self._closed = False
        self._reported: deque[Child] = deque()
        self.running: list[Child] = []

    def start(
        self,
        task: Task,
        *,
        on_exit: OnExit,
        on_note: OnNote,
        launcher: Launcher | None = None,
        incarnation: int = 0,
    ) -> Child:
        """Start a process. ``on_note`` is called with each report, ``on_exit`` after its end, when all reports were read."""
        launcher = launcher or self._forks
        exit = _Exit()
        process = launcher.start(task, partial(self._report, exit))
        child = exit.child = Child(process, task, incarnation, _on_exit=on_exit, _on_note=on_note)
        if exit.reported:  # before the child existed
            self._report(exit)
        self.running.append(child)
        if process.sentinel is not None:
            self._poller.add(process.sentinel, partial(self.end, child))
        if child.notes is not None:
            self._poller.add(child.notes.fd, partial(self._read, child))
        return child

    def attend(self) -> None:
        """Handle the exits that launchers have reported."""
        while self._reported:
            self.end(self._reported.popleft())

    def release(self, child: Child, *, read: bool = True) -> None:
        """Stop watching a process that has ended or is about to. Its exit is not handled; its last notes are, if ``read``."""
        if child.ended:
            return
        child.ended = True
        self.running.remove(child)
        if child.process.sentinel is not None:
            self._poller.drop(child.process.sentinel)
        if child.notes is not None:
            self._poller.drop(child.notes.fd)
            if read:
                child.read_notes()
            child.notes.close()

    def close(self) -> None:
        """Kill all running processes and wait for them; later reports of exits are ignored."""
        with self._lock:
            self._closed = True
        self.kill_at_once()
        for child in list(self.running):
            self.release(child, read=False)
            child.process.join()

    def kill_at_once(self) -> None:
        """Kill all running processes without waiting, as a signal handler needs."""
        for child in list(self.running):
            child.process.kill()

    def _report(self, exit: _Exit) -> None:
        """Queue the exit of a launcher's process; called from any thread."""
        exit.reported = True
        with self._lock:  # after close, the descriptor that wakes the poller may belong to another file
            if exit.child is not None and not self._closed:
                self._reported.append(exit.child)
                self._wake()

    def _read(self, child: Child) -> None:
        child.read_notes()
        if child.notes is not None and child.notes.ended:
            self._poller.drop(child.notes.fd)

    def end(self, child: Child) -> None:
        """Handle the end of a process, once."""
        if child.ended:
            return
        self.release(child)
        child.process.join()
        child._on_exit(child)


def wake_by(fd: int) -> Callable[[], None]:
    """Return a function that wakes a poller by writing into a pipe; if the pipe is full, the poller wakes anyway."""

    def wake() -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(fd, b"\0")

    return wake


def kill_if_stopped(child: Child, now: float, after: float) -> None:
    """Kill a process of this machine that has been stopped by a signal for longer than ``after`` seconds."""
    if not is_stopped(child.process):
        child.stopped_at = None
        return
    child.stopped_at = child.stopped_at or now
    if now - child.stopped_at > after:
        child.process.kill()
