"""Ctrl-C, SIGTERM and SIGUSR1: while an engine runs in this process, in a worker that has joined, and before either."""

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
"""Seconds in which a second Ctrl-C or SIGTERM is taken for the first: a terminal, a batch system and ``timeout`` may each send
theirs, and nobody asked twice."""


class Signals:
    """The first Ctrl-C or SIGTERM asks for a clean stop, a later one ends at once; SIGUSR1 asks for a checkpoint. One is there
    from the beginning of a run to what is written at its end, and within it that of the engine."""

    def __init__(self, session: Session, *, at_once: Callable[[], None] = lambda: None, waker: int | None = None) -> None:
        self._session = session
        self._at_once = at_once
        """What must be done before the second one ends the run."""
        self._waker = waker
        """A descriptor that is written to by any signal, for an engine that sleeps until something happens."""
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
    """SIGUSR1 asks a center for a checkpoint. Where there is none to write, as before the training and in a worker, it is
    nothing; left alone it would end the process. Processes that are started meanwhile are deaf to it, too."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM, by which a job is ended or preempted, is a wish to leave, as Ctrl-C is: it raises KeyboardInterrupt, once.
    Where a program has a mind of its own about it, it keeps it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a batch system may send one after that of the node
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
