"""Memory in a file that another process of this machine can map, even after its creator was killed."""

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
"""Preferred folder of such a file: it is in memory, and never written to a disk."""


def boot() -> str:
    """Return an id that changes when the machine restarts and loses its memory."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def new_name(directory: Path, size: int, kind: str) -> Path:
    """Return a path for a file of this many bytes: in memory if there is enough room, otherwise in ``directory``."""
    place = directory.resolve()
    with contextlib.suppress(OSError):
        free = os.statvfs(FAST)
        if free.f_bavail * free.f_frsize > 2 * size + (64 << 20) and os.access(FAST, os.W_OK):
            place = FAST
    return place / f"paragrad-{secrets.token_hex(8)}.{kind}"


def new_segment(path: Path) -> Segment:
    """Create a file that only its owner can read."""
    return Segment(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def whereabouts(path: Path, segment: Segment) -> dict[str, Any]:
    """Return the note from which another process of this machine can open a file."""
    return {"file": str(path), "boot": boot(), "layout": plain_layout(segment.layout)}


def segment_of(note: Mapping[str, Any]) -> Segment | None:
    """Open a file from its note; return None if the file no longer exists on this machine."""
    if "file" not in note or note["boot"] != boot():
        return None
    try:
        return Segment(os.open(note["file"], os.O_RDWR | os.O_CLOEXEC), layout_from(note["layout"]))
    except FileNotFoundError:
        return None


def write_note(path: Path, note: Mapping[str, Any]) -> None:
    """Write a note atomically; only its owner can read it."""
    aside = path.with_suffix(".tmp")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(note, file)
    aside.rename(path)


def read_note(path: Path) -> dict[str, Any]:
    """Read a note; return an empty one if there is no file."""
    try:
        note: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return note
