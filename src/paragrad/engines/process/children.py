"""The processes that this one has started and watches: their notes, and their end."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paragrad.engines.process.launcher import Forks, Launcher, Process, is_stopped
from paragrad.engines.process.notes import Notes
from paragrad.engines.process.task import Task


class Poller:
    """Descriptors that are waited for, each with the function that is called when there is something to read."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._calls: dict[int, Callable[[], None]] = {}

    def add(self, fd: int, call: Callable[[], None]) -> None:
        """Call this whenever the descriptor is readable."""
        self._calls[fd] = call
        self._poll.register(fd, select.POLLIN)

    def drop(self, fd: int) -> None:
        """Stop waiting for a descriptor; nothing happens where it is not waited for."""
        if self._calls.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def wait(self, seconds: float) -> None:
        """Wait for at most so long, and call what is due."""
        due = [(fd, self._calls.get(fd)) for fd, _ in self._poll.poll(max(1, seconds * 1000))]
        for fd, call in due:
            # A call may close the descriptor of another, and a new process be given the same number.
            if call is not None and self._calls.get(fd) is call:
                call()


@dataclass(eq=False)
class Child:
    """One started process and what is known of it."""

    process: Process
    task: Task
    incarnation: int = 0
    error: dict[str, Any] | None = None
    """The exception that ended it: its ``text``, and the ``usage`` error, if it was one."""
    stopped_at: float | None = None
    """Since when it has been stopped by a signal (monotonic)."""
    ended: bool = False
    _on_exit: Callable[[Child], None] = field(default=lambda child: None, repr=False)
    _on_note: Callable[[str, Any], None] = field(default=lambda kind, what: None, repr=False)

    @property
    def notes(self) -> Notes | None:
        """The pipe of its notes, where it is a child of this process."""
        return getattr(self.process, "notes", None)

    def read_notes(self) -> None:
        """Handle the notes that have arrived."""
        for message in [] if self.notes is None else self.notes.read():
            for kind, what in message.items():
                if kind == "error":
                    self.error = what
                else:
                    self._on_note(kind, what)


@dataclass
class _Exit:
    """A launcher's report that a process has ended."""

    child: Child | None = None
    reported: bool = False


class Children:
    """Starts processes and watches them. All is called by one thread, but for the launcher's report of an exit."""

    def __init__(self, poller: Poller, wake: Callable[[], None]) -> None:
        """``wake`` is called from any thread to end a wait of the poller."""
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
        on_exit: Callable[[Child], None],
        on_note: Callable[[str, Any], None],
        launcher: Launcher | None = None,
        incarnation: int = 0,
    ) -> Child:
        """Start a process. ``on_note`` is called with what it reports, ``on_exit`` once it has ended and all was read."""
        launcher = launcher or self._forks
        exit = _Exit()
        process = launcher.start(task, partial(self._report, exit))
        child = exit.child = Child(process, task, incarnation, _on_exit=on_exit, _on_note=on_note)
        if exit.reported:  # before it was known whose it is
            self._report(exit)
        self.running.append(child)
        if process.sentinel is not None:
            self._poller.add(process.sentinel, partial(self.end, child))
        if child.notes is not None:
            self._poller.add(child.notes.fd, partial(self._read, child))
        return child

    def attend(self) -> None:
        """Handle exits that launchers have reported."""
        while self._reported:
            self.end(self._reported.popleft())

    def release(self, child: Child, *, read: bool = True) -> None:
        """Stop watching a process that has ended, or is about to; its exit is not handled any more. ``read``: its last notes
        are."""
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
        """Kill all processes that still run, and wait for them; later reports of exits are ignored."""
        with self._lock:
            self._closed = True
        for child in list(self.running):
            child.process.kill()
        for child in list(self.running):
            self.release(child, read=False)
            child.process.join()

    def kill_at_once(self) -> None:
        """Kill all processes that still run, without waiting: for a signal handler."""
        for child in list(self.running):
            child.process.kill()

    def _report(self, exit: _Exit) -> None:
        """Note that a launcher's process has ended; called in any thread."""
        exit.reported = True
        with self._lock:  # once closed, the descriptor that wakes the poller may be another file's
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
    """Return a function that wakes a poller by writing into a pipe; a full pipe wakes it anyway."""

    def wake() -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(fd, b"\0")

    return wake


def kill_if_stopped(child: Child, now: float, after: float) -> None:
    """Kill a process of this machine that has been stopped by a signal for so many seconds."""
    if not is_stopped(child.process):
        child.stopped_at = None
        return
    child.stopped_at = child.stopped_at or now
    if now - child.stopped_at > after:
        child.process.kill()
