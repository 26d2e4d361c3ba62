"""A process claims the file that it writes for as long as it lives, so that others can tell whether someone still writes it."""

from __future__ import annotations

import contextlib
import fcntl
import struct
from pathlib import Path

FLOCK = struct.Struct("hhqqi0q")
"""struct flock of Linux: type, whence, start, length, pid."""
WHOLE_FILE = (0, 0, 0, 0)


def claim(descriptor: int) -> None:
    """Hold a lock on an open file until it is closed or its process ends, however it ends.

    The lock belongs to the open file (OFD), so that reading the same file elsewhere in the process does not give it up.
    File systems without locks do without, and the first of two writers has the claim.
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, *WHOLE_FILE))


def is_claimed(path: Path) -> bool:
    """Whether a living process has claimed this file. False also where locks of other machines are not seen."""
    with path.open("rb") as file, contextlib.suppress(OSError):
        found = fcntl.fcntl(file.fileno(), fcntl.F_OFD_GETLK, FLOCK.pack(fcntl.F_RDLCK, *WHOLE_FILE))
        return bool(FLOCK.unpack(found)[0] != fcntl.F_UNLCK)
    return False
