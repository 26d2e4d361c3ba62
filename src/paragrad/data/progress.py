"""How far the reading of files has come: whoever shows it watches, and is told; nothing is printed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class Progress:
    """A step of one pass over files."""

    what: str
    """What is being done, as a phrase: reading events.csv."""
    done: int
    total: int
    unit: Literal["bytes", "rows"]


Watcher: TypeAlias = Callable[[Progress], None]

_watcher: ContextVar[Watcher | None] = ContextVar("watcher of reading", default=None)


@contextmanager
def watched(by: Watcher) -> Iterator[None]:
    """Inside ``with``, every pass over files calls ``by`` as it goes on, in the thread that reads."""
    token = _watcher.set(by)
    try:
        yield
    finally:
        _watcher.reset(token)


def tell(what: str, done: int, total: int, unit: Literal["bytes", "rows"] = "rows") -> None:
    """Say how far a pass has come, to whoever watches."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(Progress(what, done, total, unit))
