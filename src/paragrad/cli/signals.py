"""Signals that a batch system sends to all processes of a job, also to those that they are not meant for, and too early."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


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
    """SIGTERM, by which a job is ended or preempted, raises KeyboardInterrupt, once."""

    def interrupt(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # srun may send one after that of the node
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
