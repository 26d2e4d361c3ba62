"""Memory in a file that another process of this machine can map, also after the one that made it was killed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paragrad.engines.process.segment import Segment, layout_from, plain_layout

FAST = Path("/dev/shm")
"""Where such a file is if there is room: nothing of it is ever written to a disk."""


def boot() -> str:
    """Return a text that changes when the machine is started again: what was in its memory is then lost."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def new_name(directory: Path, size: int, kind: str) -> Path:
    """Return a name for a file of so many bytes: in memory if there is ample room, else beside the run."""
    place = directory.resolve()
    with contextlib.suppress(OSError):
        free = os.statvfs(FAST)
        if free.f_bavail * free.f_frsize > 2 * size + (64 << 20) and os.access(FAST, os.W_OK):
            place = FAST
    return place / f"paragrad-{secrets.token_hex(8)}.{kind}"


def new_segment(path: Path) -> Segment:
    """Make a file that only its owner can read."""
    return Segment(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def whereabouts(path: Path, segment: Segment) -> dict[str, Any]:
    """Return what another process of this machine must know to open a file."""
    return {"file": str(path), "boot": boot(), "layout": plain_layout(segment.layout)}


def segment_of(told: Mapping[str, Any]) -> Segment | None:
    """Open a file by its whereabouts; return None where it is not on this machine any more."""
    if "file" not in told or told["boot"] != boot():
        return None
    try:
        return Segment(os.open(told["file"], os.O_RDWR | os.O_CLOEXEC), layout_from(told["layout"]))
    except FileNotFoundError:
        return None


def write_note(note: Path, told: Mapping[str, Any]) -> None:
    """Write a note of where a file is: whole or not at all, and for its owner alone."""
    aside = note.with_suffix(".tmp")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(told, file)
    aside.rename(note)


def read_note(note: Path) -> dict[str, Any]:
    """Read a note; return an empty one where there is none."""
    try:
        told: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return told
