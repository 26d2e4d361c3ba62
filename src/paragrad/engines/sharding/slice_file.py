"""A slice's memory in a mapped file, named by a note in the run directory: after a kill, another process continues from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from paragrad.engines.process import mapped_file
from paragrad.engines.process.segment import Segment
from paragrad.engines.sharding.slice import Slice, tensors_in
from paragrad.optim.cut import kept
from paragrad.optim.optimizer import OptimizerLike
from paragrad.rundir.checkpoint import Checkpoint
from paragrad.schemes.scheme import Scheme


@dataclass(frozen=True)
class Left:
    """The memory that the process of a slice has left."""

    segment: Segment
    length: int
    dtype: torch.dtype
    workers: int


def left_by(directory: Path, index: int, start_id: str) -> Left | None:
    """Return the memory that an earlier process has left for the same start of the center; None if there is none, or this
    machine has been rebooted since."""
    note = mapped_file.read_note(_sidecar(directory, index, start_id))
    segment = mapped_file.segment_of(note)
    return None if segment is None else Left(segment, note["length"], getattr(torch, note["dtype"]), note["workers"])


def make(
    directory: Path, scheme: Scheme, optimizer: OptimizerLike | None, *, workers: int, length: int, dtype: torch.dtype
) -> tuple[Slice, Path]:
    """Make a slice in a new file; return both."""
    states = 0 if optimizer is None else sum(tensor.ndim for tensor in kept(optimizer, dtype).values())
    size = length * dtype.itemsize * (2 * (1 + len(scheme.center_slots) + states) + workers * (3 + len(scheme.sends)))
    path = mapped_file.new_name(directory, size, "shard")
    segment = mapped_file.new_segment(path)
    return Slice(scheme, workers=workers, length=length, dtype=dtype, segment=segment, optimizer=optimizer), path


def publish(directory: Path, index: int, start_id: str, held: Slice, path: Path) -> None:
    """Make this slice the one that another process would continue from, and remove the earlier file."""
    sidecar, value = _sidecar(directory, index, start_id), held.center.value
    earlier = mapped_file.read_note(sidecar).get("file")
    sizes = {"workers": held.center.workers, "length": value.numel(), "dtype": str(value.dtype).removeprefix("torch.")}
    mapped_file.write_note(sidecar, mapped_file.whereabouts(path, held.segment) | sizes)
    if earlier is not None and Path(earlier) != path:
        Path(earlier).unlink(missing_ok=True)


def discard(directory: Path, start_id: str | None = None) -> None:
    """Remove the files of all slices, except those of the start ``start_id`` of the center."""
    for sidecar in directory.glob("shard-*.json"):
        if sidecar.name.split(".")[1] == start_id:
            continue
        file = mapped_file.read_note(sidecar).get("file")
        if file is not None:
            Path(file).unlink(missing_ok=True)
        sidecar.unlink(missing_ok=True)


def completed(directory: Path, found: Checkpoint | None) -> Checkpoint | None:
    """Complete the state that a killed center has left of its own slice with the slices of the shards at the same clock.
    Return None if one of them is missing."""
    if found is None or "shards" not in found.numbers:
        return found
    shards = found.numbers.pop("shards")
    parts = [found.tensors]
    workers = len(found.numbers["center"]["ledger"])
    slots = [name.removeprefix("slot.") for name in found.tensors if name.startswith("slot.")]
    for index in range(1, shards["count"]):
        left = left_by(directory, index, shards["start_id"])
        if left is None:
            return None
        parts.append(tensors_in(left.segment, slots, workers, found.numbers["clock"]))
    sharded = {name for name, tensor in parts[-1].items() if tensor.ndim}
    whole = {name: torch.cat([part[name] for part in parts]) if name in sharded else t for name, t in found.tensors.items()}
    return Checkpoint(found.path, whole, found.numbers)


def _sidecar(directory: Path, index: int, start_id: str) -> Path:
    return directory / f"shard-{index}.{start_id}.json"
