"""File locks: a process claims the file that it writes, so that others can see whether it is still alive."""

from __future__ import annotations

import contextlib
import fcntl
import struct
from pathlib import Path

FLOCK = struct.Struct("hhqqi0q")
"""struct flock of Linux: type, whence, start, length, pid."""
WHOLE_FILE = (0, 0, 0, 0)


def claim(descriptor: int) -> None:
    """Lock an open file until it is closed or its process ends.

    The lock belongs to the open file (OFD), so that reading the same file elsewhere in the process does not release it.
    Of two writers the first one holds the lock. File systems without locks are ignored.
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, *WHOLE_FILE))


def is_claimed(path: Path) -> bool:
    """Return whether a living process has claimed this file; False if locks of other machines are not visible."""
    with path.open("rb") as file, contextlib.suppress(OSError):
        found = fcntl.fcntl(file.fileno(), fcntl.F_OFD_GETLK, FLOCK.pack(fcntl.F_RDLCK, *WHOLE_FILE))
        return bool(FLOCK.unpack(found)[0] != fcntl.F_UNLCK)
    return False
