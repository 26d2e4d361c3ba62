"""Available cores and devices, and their memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import torch

from paragrad.errors import UsageError
from paragrad.jobs.factories import check_device
from paragrad.learners.learner import Learner

USED = 0.9
"""Share of a device's memory that a run may use."""
MEMORY_LIMIT, CPU_LIMIT = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/cpu.max")
"""Limits of the container; a missing file, or the word max, is no limit."""


def check(device: str, make: Callable[[str], Learner] | None = None) -> None:
    """Raise if torch cannot use the device, or if ``make`` cannot make a learner on it."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UsageError(f"device={device!r} cannot be used here ({first}): use device='cpu'.") from None
    if make is not None:
        check_device(make, device)


def room(device: str) -> int:
    """Return the bytes that a run may use on a device: a share of all its memory, not of the free part, so that runs repeat."""
    if device.startswith("cuda"):
        return int(USED * torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(MEMORY_LIMIT.read_text()))
    return int(USED * total)


def in_words(size: float) -> str:
    """Return a number of bytes with its unit."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def usable_cores() -> int:
    """Return the number of cores that this process may use: its affinity, limited by the container's quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        limit, period = map(int, CPU_LIMIT.read_text().split())
        cores = min(cores, max(1, round(limit / period)))
    return cores
