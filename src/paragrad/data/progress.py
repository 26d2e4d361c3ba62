"""Progress of reading files: reported to a watcher, which shows it. Nothing is printed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Progress:
    """Progress of one pass over files."""

    what: str
    """The current activity, as a phrase: reading events.csv."""
    done: int
    total: int
    unit: Literal["bytes", "rows"]


_watcher: ContextVar[Callable[[Progress], None] | None] = ContextVar("watcher of reading", default=None)


@contextmanager
def watched(by: Callable[[Progress], None]) -> Iterator[None]:
    """Call ``by`` with the progress of every pass over files inside ``with``, in the thread that reads."""
    token = _watcher.set(by)
    try:
        yield
    finally:
        _watcher.reset(token)


def report(what: str, done: int, total: int, unit: Literal["bytes", "rows"] = "rows") -> None:
    """Report the progress of a pass to the watcher, if there is one."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(Progress(what, done, total, unit))
