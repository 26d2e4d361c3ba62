"""A worker's residuals, that is what a codec has left out of its commits, in a file on the worker's machine: after a kill, the
next process for the same rank continues from it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path

import torch

from paragrad.engines.process import mapped_file
from paragrad.engines.process.segment import Segment
from paragrad.errors import UsageError
from paragrad.types import Commit, Reply, Vector

NONE = -1
"""Number of a row that belongs to no commit."""
STALE = 86_400.0
"""Seconds after which an unused file is removed."""


class ResidualFile:
    """Two rows, each with the number of the commit after which it is the residual. The row of an applied commit is not
    overwritten before the next reply is there. So whenever the worker is killed, one row is that of the last applied commit.
    """

    def __init__(self, like: Vector, run: str, rank: int) -> None:
        self._path, self._segment = _open(like, f"paragrad-{run}-{rank}.residual")
        self.rows = [self._segment.tensor(f"row{k}") for k in (0, 1)]
        self._numbers = self._segment.tensor("numbers")

    @property
    def kept(self) -> list[int]:
        """Commits whose residuals are known."""
        return [number for number in self._numbers.tolist() if number > 0]

    def of(self, sequence: int) -> Vector:
        """Return the residual after a commit."""
        return self.rows[self._numbers.tolist().index(sequence)]

    def after(self, sequence: int) -> dict[str, Vector]:
        """Return the residual after a commit as it is sent to the center; nothing if it is not known."""
        return {"residual": self.of(sequence)} if sequence in self.kept else {}

    def sent(self, commit: Commit) -> None:
        """Note that a commit, whose row is written, is about to be sent."""
        self._numbers[self._row(commit.residual)] = commit.sequence
        os.utime(self._segment.fd)  # writing to mapped memory does not change the time of the file

    def answered(self, reply: Reply, commit: Commit | None) -> None:
        """Note which row is valid after a reply; the other one may be overwritten. ``commit`` is None for a newcomer."""
        if commit is None:
            valid = self._row(reply.residual)
            self._numbers[1 - valid] = NONE
            self._numbers[valid] = reply.last
        else:
            row = self._row(commit.residual)
            self._numbers[1 - row if reply.applied else row] = NONE

    def close(self, *, keep: bool) -> None:
        """Close the file; with ``keep`` it stays, for another process."""
        if self._path is not None:
            if not keep:
                self._path.unlink(missing_ok=True)
            fcntl.flock(self._segment.fd, fcntl.LOCK_UN)  # mapped memory would keep the lock
        self._segment.close()

    def _row(self, residual: Vector | None) -> int:
        assert residual is not None
        return next(k for k in (0, 1) if self.rows[k].data_ptr() == residual.data_ptr())


def discard(run: str) -> None:
    """Remove what workers on this machine left of a finished run. One that was ended at the last moment leaves its file."""
    for folder in _folders():
        _remove_unused(folder, f"paragrad-{run}-*.residual", older=0.0)


def _folders() -> tuple[Path, Path]:
    """Return where files are made: in the first folder that has room."""
    return mapped_file.FAST, Path(tempfile.gettempdir())


def _open(like: Vector, name: str) -> tuple[Path | None, Segment]:
    """Open the file of that name, or make it; without room for it, or if another process uses it, return unnamed memory."""
    for folder in _folders():
        with contextlib.suppress(OSError, UsageError):
            segment = _open_file(folder / name, like)
            _remove_unused(folder, "paragrad-*.residual", older=STALE)
            return folder / name, segment
    segment = Segment()
    _lay_out(segment, like)
    return None, segment


def _open_file(path: Path, like: Vector) -> Segment:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    status = os.fstat(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_nlink != 1:
            raise PermissionError(f"{path} belongs to another user, or was removed just now.")
        segment = Segment(fd)
        _lay_out(segment, like)
        return segment
    except BaseException as error:
        if isinstance(error, UsageError) and not status.st_size:
            path.unlink(missing_ok=True)
        os.close(fd)
        raise


def _lay_out(segment: Segment, like: Vector) -> None:
    before = os.fstat(segment.fd).st_size
    segment.allocate("numbers", 2, torch.int64)
    for k in (0, 1):
        segment.allocate(f"row{k}", like.numel(), like.dtype)
    if before != os.fstat(segment.fd).st_size:  # a new file, or one of another model
        segment.tensor("numbers")[:] = NONE


def _remove_unused(folder: Path, pattern: str, *, older: float) -> None:
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError), open(path, "rb", opener=_no_link) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(file.fileno())
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > older:
                path.unlink()


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)
