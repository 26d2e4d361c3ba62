"""Ctrl-C, SIGTERM and SIGUSR1 while an engine runs in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from paragrad.session import Session


class Signals:
    """The first Ctrl-C or SIGTERM asks for a clean stop, the second ends at once; SIGUSR1 asks for a checkpoint."""

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
        elif self._session.stopped == "interrupted":
            self._at_once()
            raise KeyboardInterrupt
        else:
            self._session.stop("interrupted")
