"""Cores and devices: which there are, and how much they hold."""

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
"""The share of a device's memory that is counted on."""
CGROUP = Path("/sys/fs/cgroup/memory.max")


def check(device: str, make: Callable[[str], Learner] | None = None) -> None:
    """Raise where torch cannot compute there, or where a function that makes learners makes none there."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().partition("\n")[0]
        raise UsageError(f"device={device!r} cannot be used here ({first}): use device='cpu'.") from None
    if make is not None:
        check_device(make, device)


def room(device: str) -> int:
    """Bytes that a run may take there. It goes by what the device has, not by what is free now, so that runs repeat."""
    if device.startswith("cuda"):
        return int(USED * torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(CGROUP.read_text()))
    return int(USED * total)


def in_words(size: float) -> str:
    """Bytes as people say them."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and the container's quota."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as quota:
            limit, period = quota.read().split()
        if limit != "max":
            cores = min(cores, max(1, round(int(limit) / int(period))))
    return cores
