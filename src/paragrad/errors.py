"""What can go wrong, by who has to act: the caller (UsageError), a worker's code, or the numbers themselves."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from signal import SIGINT
from typing import Any


class ParagradError(Exception):
    """Every error that paragrad raises on purpose."""


class ParagradWarning(UserWarning):
    """Something in a run that the user must not miss; every warning that paragrad gives through ``warnings`` is one."""


class UsageError(ParagradError, ValueError):
    """The caller asked for something that cannot be; the message names the value and the remedy."""


class WorkerError(ParagradError, RuntimeError):
    """A worker failed: its own exception with its traceback, or the signal that ended it."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"Worker {rank} failed: {reason}")
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple[type[WorkerError], tuple[int, str]]:
        return type(self), (self.rank, self.reason)


class ReadError(ParagradError, RuntimeError):
    """The process that reads rows for the workers failed, and no other can go on in its place."""


class Diverged(ParagradError, ArithmeticError):
    """Training ran into NaN or infinity again and again; the center still holds the last finite weights."""


class Interrupted(ParagradError, KeyboardInterrupt):
    """The run was stopped by Ctrl-C or SIGTERM after a checkpoint; ``directory`` can be resumed, ``signal`` is its number."""

    def __init__(self, message: str, directory: str, signal: int = SIGINT) -> None:
        super().__init__(message)
        self.directory = directory
        self.signal = signal


class NotWritten(ParagradError):
    """The training is done, but the disk did not take the model or the summary; ``result`` holds both."""

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result


class NotReplayed(ParagradError):
    """A replay left the record: what it did is not what the record says was done."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown name, with the nearest known name and all that are available."""
    names = sorted(known)
    near = get_close_matches(name.lower(), [n.lower() for n in names], n=len(names) or 1)
    near.sort(key=lambda n: n[:1] != name[:1].lower())  # a typing error is seldom in the first letter
    match = next((n for n in names if near and n.lower() == near[0]), None)
    hint = f" Did you mean {match!r}?" if match else ""
    return UsageError(f"Unknown {kind} {name!r}.{hint} Available: {', '.join(names)}.")


def counted(count: int, what: str) -> str:
    """A number and its noun: 1 worker, 2 workers, 1 mini-batch, 2 mini-batches."""
    return f"{count:,} {what}" + ("" if count == 1 else "es" if what.endswith(("tch", "ss", "x")) else "s")
