"""Exceptions and warnings of paragrad, and two helpers for the wording of messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from signal import SIGINT
from typing import Any


class ParagradError(Exception):
    """Base class of all errors that paragrad raises on purpose."""


class ParagradWarning(UserWarning):
    """Category of all warnings that paragrad gives through ``warnings``: the user should not miss them."""


class UsageError(ParagradError, ValueError):
    """The caller asked for something impossible; the message names the value and the remedy."""


class WorkerError(ParagradError, RuntimeError):
    """A worker failed; the message has its exception and traceback, or the signal that ended it."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"Worker {rank} failed: {reason}")
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple[type[WorkerError], tuple[int, str]]:
        return type(self), (self.rank, self.reason)


class ReadError(ParagradError, RuntimeError):
    """The process that reads rows for the workers failed, and no other process can replace it."""


class Diverged(ParagradError, ArithmeticError):
    """Training produced NaN or infinity several times in a row; the center still holds the last finite weights."""


class Interrupted(ParagradError, KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped the run; ``directory`` is the run to resume, ``signal`` the number of the signal."""

    def __init__(self, message: str, directory: str, signal: int = SIGINT) -> None:
        super().__init__(message)
        self.directory = directory
        self.signal = signal


class NotWritten(ParagradError):
    """The training is done, but the model or the summary could not be written; ``result`` holds both."""

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result


class NotReplayed(ParagradError):
    """A replay departed from the record of its run."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown name, with the nearest known name and all available names."""
    names = sorted(known)
    near = get_close_matches(name.lower(), [n.lower() for n in names], n=len(names) or 1)
    near.sort(key=lambda n: n[:1] != name[:1].lower())  # typos rarely change the first letter
    match = next((n for n in names if near and n.lower() == near[0]), None)
    hint = f" Did you mean {match!r}?" if match else ""
    return UsageError(f"Unknown {kind} {name!r}.{hint} Available: {', '.join(names)}.")


def counted(count: int, what: str) -> str:
    """Return a number and its noun: 1 worker, 2 workers, 1 mini-batch, 2 mini-batches."""
    return f"{count:,} {what}" + ("" if count == 1 else "es" if what.endswith(("tch", "ss", "x")) else "s")
