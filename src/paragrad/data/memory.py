"""Memory that this process may still use."""

from __future__ import annotations

import contextlib
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
GROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def available() -> int:
    """Return the bytes that this process can still allocate, within the limits of the machine and of its control groups."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":") for line in MEMINFO.read_text().splitlines() if ":" in line)
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    for folder in _groups():
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # without a limit the file holds "max", which is not a number
                allowed = int((folder / limit).read_text())
                # The kernel counts cached files as used, but frees them on demand.
                found.append(allowed - int((folder / used).read_text()) + _cached(folder))
    return max(0, min(found, default=2**62))


def _groups() -> list[Path]:
    """Return the control groups of this process, from the innermost outwards."""
    folders = [CGROUPS, CGROUPS / "memory"]
    with contextlib.suppress(OSError):
        for line in GROUP.read_text().splitlines():
            _, controllers, inner = line.split(":", 2)
            root = CGROUPS / "memory" if "memory" in controllers else CGROUPS
            path = root / inner.strip("/")
            while path != root and root in path.parents:
                folders.append(path)
                path = path.parent
    return folders


def _cached(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(lines.get("inactive_file", 0))
    return 0
