"""Child processes from a fork server that has torch loaded, so that a replacement starts in hundredths of a second."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import multiprocessing.context
import multiprocessing.util
import os
import signal
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from typing import Any

PRELOAD = ["paragrad.engines.preload"]
PRELOAD_KERAS = "paragrad.engines.preload_keras"
_PR_SET_PDEATHSIG = 1


def server() -> multiprocessing.context.ForkServerContext:
    """Start the fork server if it does not run yet; it loads torch while the caller continues."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, PRELOAD_KERAS] if _has_keras() else PRELOAD)
    from multiprocessing.forkserver import ensure_running

    with hidden_main():
        ensure_running()
    return context


def _has_keras() -> bool:
    backend = getattr(sys.modules.get("keras"), "backend", None)
    return backend is not None and backend.backend() == "torch"


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Keep children from importing the caller's script again: scripts need no main guard, and notebooks work."""
    real = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = real


class Fd:
    """A descriptor in a child's arguments; the child gets a duplicate from ``open``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Callable[..., Fd], tuple[Any]]:
        return _received, (reduction.DupFd(self._fd),)

    def open(self) -> int:
        """Return the descriptor that is valid in this process."""
        return self._fd


def _received(duplicate: Any) -> Fd:
    return Fd(duplicate.detach())


def start(target: Callable[..., None], *arguments: Any, name: str) -> BaseProcess:
    """Start one child; wrap descriptors in its arguments in ``Fd``."""
    process = server().Process(target=_child, args=(target, arguments), name=name, daemon=True)
    with hidden_main():
        process.start()
    _started.add(process)
    return process


_started: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def _end_children() -> None:
    # At exit multiprocessing sends SIGTERM to the remaining children, which ignore it, and waits for them.
    for process in _started:
        with contextlib.suppress(ValueError):  # it was closed
            process.kill()


atexit.register(_end_children)  # runs before the exit function of multiprocessing.util, which was registered earlier


def _child(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent handles them and ends its children
        signal.signal(number, signal.SIG_IGN)
    _close_server_pipe()
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    target(*arguments)


def _close_server_pipe() -> None:
    """Close this child's copy of the pipe that keeps the fork server alive.

    Otherwise, after the parent is killed, the server would live as long as a worker, and the workers as long as the server.
    """
    from multiprocessing import forkserver

    state: Any = forkserver._forkserver
    if state._forkserver_alive_fd is not None:
        os.close(state._forkserver_alive_fd)
        state._forkserver_alive_fd = None
