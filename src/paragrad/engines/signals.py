"""Ctrl-C, SIGTERM and SIGUSR1 while an engine runs in this process."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any

from paragrad.session import Session


class Signals:
    """The first Ctrl-C or SIGTERM asks for a clean stop, the second ends at once; SIGUSR1 asks for a checkpoint."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGUSR1:
            self._session.ask_for_checkpoint()
        elif self._session.stopped == "interrupted":
            raise KeyboardInterrupt
        else:
            self._session.stop("interrupted")
