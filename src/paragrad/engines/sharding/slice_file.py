"""A slice's memory in a mapped file, and where it lies, in the run directory: a killed process leaves it to the next."""

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


def sidecar(directory: Path, index: int, start_id: str) -> Path:
    """Where it is written down what lies where."""
    return directory / f"shard-{index}.{start_id}.json"


@dataclass(frozen=True)
class Left:
    """What a slice has left."""

    file: Path
    segment: Segment
    length: int
    dtype: torch.dtype
    workers: int


def left_by(directory: Path, index: int, start_id: str) -> Left | None:
    """The memory of a slice of the same start_id of the same center, if it was on this machine since that was started."""
    told = mapped_file.read_note(sidecar(directory, index, start_id))
    segment = mapped_file.segment_of(told)
    if segment is None:
        return None
    return Left(Path(told["file"]), segment, told["length"], getattr(torch, told["dtype"]), told["workers"])


def make(
    directory: Path, scheme: Scheme, optimizer: OptimizerLike | None, *, workers: int, length: int, dtype: torch.dtype
) -> tuple[Slice, Path]:
    """A slice in a new file."""
    states = 0 if optimizer is None else sum(tensor.ndim for tensor in kept(optimizer, dtype).values())
    size = length * dtype.itemsize * (2 * (1 + len(scheme.center_slots) + states) + workers * (3 + len(scheme.sends)))
    path = mapped_file.new_name(directory, size, "shard")
    segment = mapped_file.new_segment(path)
    return Slice(scheme, workers=workers, length=length, dtype=dtype, segment=segment, optimizer=optimizer), path


def publish(directory: Path, index: int, start_id: str, held: Slice, path: Path) -> None:
    """From here on this is what another process would go on from; what it took over is given up."""
    where, value = sidecar(directory, index, start_id), held.center.value
    earlier = mapped_file.read_note(where).get("file")
    told = {"workers": held.center.workers, "length": value.numel(), "dtype": str(value.dtype).removeprefix("torch.")}
    mapped_file.write_note(where, mapped_file.whereabouts(path, held.segment) | told)
    if earlier is not None and Path(earlier) != path:
        Path(earlier).unlink(missing_ok=True)


def discard(directory: Path, start_id: str | None = None) -> None:
    """The run is over, or a checkpoint holds it; or only this ``start_id`` of the center counts any more."""
    for where in directory.glob("shard-*.json"):
        if where.name.split(".")[1] == start_id:
            continue
        file = mapped_file.read_note(where).get("file")
        if file is not None:
            Path(file).unlink(missing_ok=True)
        where.unlink(missing_ok=True)


def completed(directory: Path, found: Checkpoint | None) -> Checkpoint | None:
    """What a killed center has left of its own slice, with what the shards have left of theirs, of the same clock."""
    if found is None or "shards" not in found.numbers:
        return found
    told = found.numbers.pop("shards")
    parts = [found.tensors]
    workers = len(found.numbers["center"]["ledger"])
    for index in range(1, told["count"]):
        left = left_by(directory, index, told["start_id"])
        if left is None:
            return None
        slots = [name.removeprefix("slot.") for name in found.tensors if name.startswith("slot.")]
        parts.append(tensors_in(left.segment, slots, workers, found.numbers["clock"]))
    spread = {name for name, tensor in parts[-1].items() if tensor.ndim}
    whole = {name: torch.cat([part[name] for part in parts]) if name in spread else t for name, t in found.tensors.items()}
    return Checkpoint(found.path, whole, found.numbers)
