"""The center's state in a mapped file, from which another process continues after the center was killed.

Vectors are written into the spare one of two buffers, as always. The numbers that belong to them are written into the spare
one of two pages. A single number selects the valid pair; it changes after the commit is in the record and before the worker
gets its reply.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from paragrad.core.center import Center
from paragrad.engines.process.mapped_file import new_name, new_segment, read_note, segment_of, whereabouts, write_note
from paragrad.engines.process.segment import Segment
from paragrad.errors import ParagradError
from paragrad.rundir.checkpoint import Checkpoint

SIDECAR = "center.json"
PAGE = 1 << 20
"""Bytes for the numbers, in addition to those for the leased mini-batches."""


class DurableState:
    """The mapped file of one start of the center."""

    def __init__(self, directory: Path, *, size: int, workers: int, window: int) -> None:
        self._sidecar = directory / SIDECAR
        note = read_note(self._sidecar)
        self._earlier = [Path(name) for name in note.get("files", ())]
        self.path = new_name(directory, size, "center")
        # The note names all files that may exist, including those of a center that was killed before it had begun.
        write_note(self._sidecar, {**note, "files": self._files()})
        self.segment = new_segment(self.path)
        room = PAGE + 64 * workers * window
        self._pages = [self.segment.allocate(f"page{i}", room, torch.uint8).numpy() for i in (0, 1)]
        self._kept = self.segment.allocate("kept", 1, torch.int64).numpy()
        self.flips = -1
        """Number of updates of the center when it was last kept."""
        self._published = 0
        """Tensors in the layout that was last written into the note."""
        self._changed = [set(range(workers)), set(range(workers))]
        """Workers whose last reply is not yet in the first, or the second, copy."""

    def keep(self, center: Center, numbers: dict[str, Any], answered: set[int]) -> None:
        """Make this the state that another process would continue from. ``answered``: workers with new replies."""
        number = int(self._kept[0]) + 1
        side = number & 1
        numbers = {"flips": center.flips, **numbers}
        if center.optimizer is not None:
            state = center.optimizer.state()
            for name, tensor in state.items():
                self._write(f"optimizer{side}.{name}", tensor)
            numbers["optimizer"] = {name: list(tensor.shape) for name, tensor in state.items()}
        if center.scheme.answers == "remembered":
            # A worker's last reply is part of the state, and the next commit overwrites it while it is applied.
            for changed in self._changed:
                changed.update(answered)
            for worker in self._changed[side]:
                self._write(f"given{side}.{worker}", center.answers[worker])
            self._changed[side].clear()
        if 0 < self._published != len(self.segment.layout):
            self._publish()
        data = json.dumps(numbers, separators=(",", ":")).encode()
        page = self._pages[side]
        if len(data) + 8 > page.nbytes:
            raise ParagradError(f"The center's numbers need {len(data):,} bytes, but only {page.nbytes:,} are reserved.")
        page[:8] = bytearray(len(data).to_bytes(8, "little"))
        page[8 : 8 + len(data)] = bytearray(data)
        self._kept[0] = number
        self.flips = center.flips
        if not self._published:
            self._publish()  # only now: until the first state is complete, that of an earlier start is valid
            for path in self._earlier:
                path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove all files: the run is over, or a checkpoint has its state."""
        for path in (*self._earlier, self.path, self._sidecar):
            path.unlink(missing_ok=True)

    def _files(self) -> list[str]:
        return [str(path) for path in (*self._earlier, self.path)]

    def _publish(self) -> None:
        write_note(self._sidecar, {"files": self._files(), **whereabouts(self.path, self.segment)})
        self._published = len(self.segment.layout)

    def _write(self, name: str, value: torch.Tensor) -> None:
        if name not in self.segment.layout:
            self.segment.allocate(name, value.numel(), value.dtype)
        self.segment.tensor(name).copy_(value.reshape(-1))


def left_in(directory: Path) -> Checkpoint | None:
    """Return the state that a killed center has left in a run directory; None if there is none, or this machine has been
    rebooted since."""
    note = read_note(directory / SIDECAR)
    segment = segment_of(note)
    if segment is None:
        return None
    try:
        return _read(segment, Path(note["file"]))
    finally:
        segment.close()


def _read(segment: Segment, path: Path) -> Checkpoint | None:
    number = int(segment.tensor("kept")[0])
    if number == 0:
        return None
    side = number & 1
    page = segment.tensor(f"page{side}").numpy()
    numbers: dict[str, Any] = json.loads(page[8 : 8 + int.from_bytes(page[:8].tobytes(), "little")].tobytes())
    shapes: dict[str, list[int]] = numbers.pop("optimizer", {})
    buffer = numbers.pop("flips") & 1
    slots = numbers.pop("slots")
    tensors = {name: segment.tensor(f"{name}{buffer}").clone() for name in ("value", "buffers", "integers")}
    tensors |= {f"slot.{name}": segment.tensor(f"{name}{buffer}").clone() for name in slots}
    for worker in range(len(numbers["center"]["ledger"])):
        for name in (f"given{side}.{worker}", f"answer{worker}"):
            if name in segment.layout:
                tensors[f"answer.{worker}"] = segment.tensor(name).clone()
                break
    for name, shape in shapes.items():
        tensors[f"optimizer.{name}"] = segment.tensor(f"optimizer{side}.{name}").view(shape).clone()
    return Checkpoint(path, tensors, numbers)
