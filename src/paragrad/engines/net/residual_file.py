"""What a codec has left out of a worker's commits, in a file of the worker's own machine: a killed process leaves it to the
next that is there in its place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from paragrad.engines.process import mapped_file
from paragrad.engines.process.segment import Segment
from paragrad.errors import UsageError
from paragrad.types import Commit, Reply, Vector

NONE = -1
"""Instead of a commit's number: what lies there is of none."""
STALE = 86_400.0
"""Seconds after which what nobody has come for is removed."""


class ResidualFile:
    """Two rows, and for each the commit after which it is what was left out. A row whose commit was applied is not written to
    before the answer to the next is there: whatever the moment of a kill, one of the numbers is that of the last one applied.
    """

    def __init__(self, like: Vector, run: str, rank: int) -> None:
        self._path, self._segment = _found(like, f"paragrad-{run}-{rank}.residual")
        self.rows = [self._segment.tensor(f"row{k}") for k in (0, 1)]
        self._numbers = self._segment.tensor("numbers")

    @property
    def kept(self) -> list[int]:
        """Commits after which it is known what was left out."""
        return [number for number in self._numbers.tolist() if number > 0]

    def of(self, sequence: int) -> Vector:
        """What was left out after that commit."""
        return self.rows[self._numbers.tolist().index(sequence)]

    def after(self, sequence: int) -> dict[str, Vector]:
        """The same, as it is brought to the center; nothing where it is not known."""
        return {"residual": self.of(sequence)} if sequence in self.kept else {}

    def sent(self, commit: Commit) -> None:
        """Its row is written, and it is about to go out."""
        self._numbers[self._row(commit.residual)] = commit.sequence
        os.utime(self._segment.fd)  # it is in use: memory that is mapped does not say so by itself

    def answered(self, reply: Reply, commit: Commit | None) -> None:
        """What it says of the rows: which holds, and which may be written to."""
        if commit is None:  # a newcomer: this is where it goes on from
            holds = self._row(reply.residual)
            self._numbers[1 - holds] = NONE
            self._numbers[holds] = reply.last
        else:
            row = self._row(commit.residual)
            self._numbers[1 - row if reply.applied else row] = NONE

    def close(self, *, keep: bool) -> None:
        """Let go of it; with ``keep`` another may go on from it."""
        if self._path is not None:
            if not keep:
                self._path.unlink(missing_ok=True)
            fcntl.flock(self._segment.fd, fcntl.LOCK_UN)  # memory that is mapped would hold it
        self._segment.close()

    def _row(self, residual: Vector | None) -> int:
        assert residual is not None
        return next(k for k in (0, 1) if self.rows[k].data_ptr() == residual.data_ptr())


def _found(like: Vector, name: str) -> tuple[Path | None, Segment]:
    """The file of that name, as it was left or new; memory without a name where none can be had."""
    for folder in (mapped_file.FAST, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError, UsageError):  # no room there, or another process works on this place still
            segment = _opened(folder / name, like)
            _remove_stale(folder)
            return folder / name, segment
    segment = Segment()
    _lay_out(segment, like)
    return None, segment


def _lay_out(segment: Segment, like: Vector) -> None:
    """Zeros, where there was nothing; of no commit."""
    before = os.fstat(segment.fd).st_size
    segment.allocate("numbers", 2, torch.int64)
    for k in (0, 1):
        segment.allocate(f"row{k}", like.numel(), like.dtype)
    if before != os.fstat(segment.fd).st_size:
        segment.tensor("numbers")[:] = NONE


def _opened(path: Path, like: Vector) -> Segment:
    """The file; raises where it cannot be had, or another process has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    status = os.fstat(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_nlink != 1:
            raise PermissionError(f"{path} is another's, or was removed just now.")
        segment = Segment(fd)
        _lay_out(segment, like)
        return segment
    except BaseException as error:
        if isinstance(error, UsageError) and not status.st_size:
            path.unlink(missing_ok=True)
        os.close(fd)
        raise


def _remove_stale(folder: Path) -> None:
    """Files that were left by processes for which no other has come."""
    for path in folder.glob("paragrad-*.residual"):
        with contextlib.suppress(OSError), _locked(path) as status:
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > STALE:
                path.unlink()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[os.stat_result]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(fd)
    finally:
        os.close(fd)
