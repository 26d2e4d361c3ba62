"""A slice's memory in a mapped file, and where it lies, in the run directory: a killed process leaves it to the next."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paragrad.checkpoint import Checkpoint
from paragrad.engines import memory
from paragrad.engines.memory import DTYPES, boot
from paragrad.engines.shared import Segment
from paragrad.engines.slice import Slice, tensors_in
from paragrad.schemes.scheme import Scheme


def sidecar(directory: Path, index: int, life: str) -> Path:
    """Where it is written down what lies where."""
    return directory / f"shard-{index}.{life}.json"


@dataclass(frozen=True)
class Left:
    """What a slice has left."""

    file: Path
    segment: Segment
    length: int
    dtype: torch.dtype
    workers: int


def left_by(directory: Path, index: int, life: str) -> Left | None:
    """The memory of a slice of the same life of the same center, if it was on this machine since that was started."""
    try:
        told = json.loads(sidecar(directory, index, life).read_text(encoding="utf-8"))
        if told["boot"] != boot():
            return None
        fd = os.open(told["file"], os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError, KeyError):
        return None
    layout = {name: (offset, length, DTYPES[dtype]) for name, (offset, length, dtype) in told["layout"].items()}
    return Left(Path(told["file"]), Segment(fd, layout), told["length"], DTYPES[told["dtype"]], told["workers"])


def make(directory: Path, index: int, scheme: Scheme, *, workers: int, length: int, dtype: torch.dtype) -> tuple[Slice, Path]:
    """A slice in a new file."""
    size = length * dtype.itemsize * (2 * (1 + len(scheme.center_slots)) + workers * (3 + len(scheme.sends)))
    path = memory._place(directory, size) / f"paragrad-{secrets.token_hex(8)}.shard"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return Slice(scheme, workers=workers, length=length, dtype=dtype, segment=Segment(fd)), path


def publish(directory: Path, index: int, life: str, held: Slice, path: Path) -> None:
    """From here on this is what another process would go on from; what it took over is given up."""
    where = sidecar(directory, index, life)
    earlier = _file(where)
    layout = {name: [offset, length, str(dtype)] for name, (offset, length, dtype) in held.segment.layout.items()}
    value = held.center.value
    told: dict[str, Any] = {"file": str(path), "boot": boot(), "workers": held.center.workers, "layout": layout}
    told |= {"length": value.numel(), "dtype": str(value.dtype)}
    aside = where.with_suffix(".tmp")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(told, file)
    aside.rename(where)
    if earlier is not None and earlier != path:
        earlier.unlink(missing_ok=True)


def discard(directory: Path, life: str | None = None) -> None:
    """The run is over, or a checkpoint holds it; or only this ``life`` of the center counts any more."""
    for where in directory.glob("shard-*.json"):
        if where.name.split(".")[1] == life:
            continue
        file = _file(where)
        if file is not None:
            file.unlink(missing_ok=True)
        where.unlink(missing_ok=True)


def completed(directory: Path, found: Checkpoint | None) -> Checkpoint | None:
    """What a killed center has left of its own slice, with what the shards have left of theirs, of the same clock."""
    if found is None or "shards" not in found.numbers:
        return found
    told = found.numbers.pop("shards")
    parts = [found.tensors]
    workers = len(found.numbers["center"]["ledger"])
    for index in range(1, told["count"]):
        left = left_by(directory, index, told["life"])
        if left is None:
            return None
        slots = [name.removeprefix("slot.") for name in found.tensors if name.startswith("slot.")]
        parts.append(tensors_in(left.segment, slots, workers, found.numbers["clock"]))
    spread = parts[-1].keys()
    whole = {name: torch.cat([part[name] for part in parts]) if name in spread else t for name, t in found.tensors.items()}
    return Checkpoint(found.path, whole, found.numbers)


def _file(where: Path) -> Path | None:
    try:
        return Path(json.loads(where.read_text(encoding="utf-8"))["file"])
    except (OSError, ValueError, KeyError):
        return None
