"""What a run tells its caller: progress and notes on the screen, warnings through ``warnings``, the rest by ``logging``."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from paragrad.errors import ParagradWarning, UsageError
from paragrad.run import Run
from paragrad.rundir.display import Display
from paragrad.types import Event

Verbose: TypeAlias = Literal["auto"] | bool | int
LOG = logging.getLogger("paragrad")
LOG.addHandler(logging.NullHandler())
LEVELS = {"note": logging.INFO, "lost": logging.INFO, "refused": logging.INFO, "resume": logging.INFO, "end": logging.INFO}
"""Levels of events in the log; the others are for debugging. Commits are in the record alone: there are too many."""


class Notices:
    """A callback that tells the caller of ``pg.train``; one that the command line shows itself is only logged.

    Warnings name the caller's line. Those known before the run are given by ``before``, where the filter "error" may stop it
    before anything is written. Later ones never end a run: where the filter would, they go to stderr.
    """

    def __init__(self, run: Run, verbose: Verbose) -> None:
        check_verbose(verbose)
        shown = any(isinstance(callback, Display) for callback in run.callbacks)
        lines = verbose != "auto"
        self._display = None if shown or not verbose else Display(lines=lines, max_seconds=run.stop.seconds)
        self._warns = not shown
        self._caller = _caller()
        self._directory = ""
        self._given: set[str] = set()

    def before(self, messages: Iterable[str]) -> None:
        """Warn of what is known before the run; their events are not shown again."""
        if self._warns:
            for message in messages:
                self._given.add(message)
                self._warn(message)

    def __call__(self, event: Event) -> None:
        if event.kind == "warning":
            self._on_warning(event.data["message"])
        else:
            if event.kind != "commit":
                LOG.log(LEVELS.get(event.kind, logging.DEBUG), "%s: %s", event.kind, event.data.get("message", event.data))
            if self._display is not None:
                self._show(self._display, event)

    def reads(self) -> AbstractContextManager[None]:
        """Inside ``with``, how far files have been read is shown."""
        return contextlib.nullcontext() if self._display is None else self._display.reads()

    def close(self) -> None:
        """Give the terminal back."""
        if self._display is not None:
            self._display.close()

    def _show(self, display: Display, event: Event) -> None:
        display(event)
        if event.kind == "directory":
            self._directory = event.data["path"]
        if event.kind == "end" and not display.console.is_terminal:  # a live view has it in its frame
            display.note(f"Run directory: {self._directory}")

    def _on_warning(self, message: str) -> None:
        if not self._warns or message in self._given:
            return
        try:
            self._warn(message)
        except ParagradWarning:
            with contextlib.suppress(OSError):  # stderr may be a file on a disk that is full
                print(f"WARNING: {message}", file=sys.stderr, flush=True)

    def _warn(self, message: str) -> None:
        warnings.warn_explicit(message, ParagradWarning, **self._caller)


def check_verbose(verbose: Verbose) -> None:
    """Raise where ``verbose`` is no level."""
    if verbose not in ("auto", 0, 1):
        raise UsageError(f"verbose={verbose!r}, but it is 'auto', 0 (nothing is shown) or 1 (plain lines).")


def show_notes(notes: Iterable[str], verbose: Verbose) -> None:
    """Print notes to a caller in Python, one line each, and log them; ``verbose=0``: only log them."""
    check_verbose(verbose)
    for note in notes:
        LOG.info("note: %s", note)
        if verbose:
            print(note, flush=True)


def _caller() -> dict[str, Any]:
    """Where the code that called paragrad is, as ``warnings.warn_explicit`` takes it: known in any thread and at any depth."""
    package, frame = str(Path(__file__).parents[1]), sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "<unknown>")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return {"filename": frame.f_code.co_filename, "lineno": frame.f_lineno, "module": module, "registry": registry}
