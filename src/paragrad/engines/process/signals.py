"""Handling of Ctrl-C, SIGTERM and SIGUSR1 in the process that trains and in workers that join."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paragrad.rundir.session import Session


ECHO = 1.0
"""Seconds after a first Ctrl-C or SIGTERM in which a second one is ignored: a terminal, a batch system and ``timeout`` may each
send one."""


class Signals:
    """The first Ctrl-C or SIGTERM asks for a clean stop, a later one ends the run at once. SIGUSR1 asks for a checkpoint.

    ``pg.train`` uses one for the whole run, and the engine another one inside it.
    """

    def __init__(self, session: Session, *, at_once: Callable[[], None] = lambda: None, waker: int | None = None) -> None:
        self._session = session
        self._at_once = at_once
        """Called before the second signal ends the run."""
        self._waker = waker
        """Descriptor that every signal writes to, for an engine that sleeps until something happens."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._on_signal)
            if self._waker is not None:
                self._waker_before = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before and self._waker is not None:
            signal.set_wakeup_fd(self._waker_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGUSR1:
            self._session.ask_for_checkpoint()
        elif self._session.interrupted_at is None:
            self._session.interrupted_at = time.monotonic()
            self._session.interrupted_by = number
            self._session.stop("interrupted")
        elif time.monotonic() > self._session.interrupted_at + ECHO:
            self._at_once()
            raise KeyboardInterrupt


@contextlib.contextmanager
def not_ended_by_usr1() -> Iterator[None]:
    """Ignore SIGUSR1, which asks for a checkpoint, before training and in a worker: by default it would end the process.

    Processes that are started meanwhile ignore it, too.
    """
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Let the first SIGTERM, by which a job is ended or preempted, raise KeyboardInterrupt, like Ctrl-C.

    A handler that the program has set stays in place.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a batch system may send another one
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
