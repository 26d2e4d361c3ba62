"""Messages of a run to its caller: notes on the screen, warnings through ``warnings``, the rest through ``logging``."""

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
"""Log levels of events; the others have DEBUG. Commits are not logged, because there are too many."""


class Notices:
    """A callback that informs the caller of ``pg.train``; it only logs if the command line has its own display.

    Warnings name the caller's line. ``before`` gives those known before the run, when the filter "error" may still stop it.
    Later warnings never end a run: with that filter they go to stderr.
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
        """Give the warnings known before the run; their events are not shown again."""
        if self._warns:
            for message in messages:
                self._given.add(message)
                self._warn(message)

    def __call__(self, event: Event) -> None:
        if event.kind == "warning":
            self._on_warning(event.data["message"])
            return
        if event.kind != "commit":
            LOG.log(LEVELS.get(event.kind, logging.DEBUG), "%s: %s", event.kind, event.data.get("message", event.data))
        if self._display is not None:
            self._display(event)
            if event.kind == "directory":
                self._directory = event.data["path"]
            if event.kind == "end" and not self._display.console.is_terminal:  # a live view shows it in its frame
                self._display.note(f"Run directory: {self._directory}")

    def reads(self) -> AbstractContextManager[None]:
        """Inside ``with``, show the progress of reading files."""
        return contextlib.nullcontext() if self._display is None else self._display.reads()

    def close(self) -> None:
        """Restore the terminal."""
        if self._display is not None:
            self._display.close()

    def _on_warning(self, message: str) -> None:
        if not self._warns or message in self._given:
            return
        try:
            self._warn(message)
        except ParagradWarning:
            with contextlib.suppress(OSError):  # stderr may be a file on a full disk
                print(f"WARNING: {message}", file=sys.stderr, flush=True)

    def _warn(self, message: str) -> None:
        warnings.warn_explicit(message, ParagradWarning, **self._caller)


def check_verbose(verbose: Verbose) -> None:
    """Raise if ``verbose`` is not valid."""
    if verbose not in ("auto", 0, 1):
        raise UsageError(f"verbose={verbose!r}, but it must be 'auto', 0 (no output) or 1 (plain lines).")


def show_notes(notes: Iterable[str], verbose: Verbose) -> None:
    """Print and log notes, one line each; with ``verbose=0`` only log them."""
    check_verbose(verbose)
    for note in notes:
        LOG.info("note: %s", note)
        if verbose:
            print(note, flush=True)


def _caller() -> dict[str, Any]:
    """Return the place that called paragrad, for ``warnings.warn_explicit`` in any thread and at any depth."""
    package, frame = str(Path(__file__).parents[1]), sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "<unknown>")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return {"filename": frame.f_code.co_filename, "lineno": frame.f_lineno, "module": module, "registry": registry}
