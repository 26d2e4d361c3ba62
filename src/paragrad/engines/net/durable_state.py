"""The center's state in a mapped file: where a center was killed, another one continues from it.

Vectors are written into the spare one of two buffers, as ever; the numbers that belong to them, into the spare one of two
pages; and one number says which pair holds. It is moved after the record has the commit and before its worker has the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
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
"""Bytes for the numbers, besides those for the mini-batches on lease."""


class DurableState:
    """The file of one incarnation of the center."""

    def __init__(self, directory: Path, *, size: int, workers: int, window: int) -> None:
        self._sidecar = directory / SIDECAR
        told = read_note(self._sidecar)
        self._earlier = [Path(name) for name in told.get("files", ())]
        self.path = new_name(directory, size, "center")
        # All files that may be there are named, also those of a center that was killed before it had begun.
        write_note(self._sidecar, {**told, "files": [str(path) for path in (*self._earlier, self.path)]})
        self.segment = new_segment(self.path)
        room = PAGE + 64 * workers * window
        self._pages = [self.segment.allocate(f"page{i}", room, torch.uint8).numpy() for i in (0, 1)]
        self._kept = self.segment.allocate("kept", 1, torch.int64).numpy()
        self._flips = -1
        self._laid_out = 0
        self._changed = [set(range(workers)), set(range(workers))]
        """Workers whose last answer is not yet in the one, or the other, copy."""

    @property
    def flips(self) -> int:
        """How often the center had changed when it was last kept."""
        return self._flips

    def keep(self, center: Center, numbers: dict[str, Any], flips: int, answered: Iterable[int]) -> None:
        """From here on this is what another process would go on from. ``answered`` are workers with new answers."""
        number = int(self._kept[0]) + 1
        side = number & 1
        numbers = {"flips": flips, **numbers}
        if center.optimizer is not None:
            numbers["optimizer"] = self._keep_optimizer(center, side)
        if center.scheme.answers == "remembered":
            # What a worker was last given is part of the state, and written to while its next commit is applied.
            self._changed[side] |= set(answered)
            self._changed[1 - side] |= set(answered)
            for worker in self._changed[side]:
                self._tensor(f"given{side}.{worker}", center.answers[worker])
            self._changed[side].clear()
        if 0 < self._laid_out != len(self.segment.layout):
            self._publish()
        data = json.dumps(numbers, separators=(",", ":")).encode()
        page = self._pages[side]
        if len(data) + 8 > page.nbytes:
            raise ParagradError(
                f"The center's numbers take {len(data):,} bytes, more than the {page.nbytes:,} that were set aside."
            )
        page[:8] = bytearray(len(data).to_bytes(8, "little"))
        page[8 : 8 + len(data)] = bytearray(data)
        self._kept[0] = number
        self._flips = flips
        if not self._laid_out:
            self._publish()  # not before there is something in it: until then an earlier incarnation's holds
            for path in self._earlier:
                path.unlink(missing_ok=True)

    def _publish(self) -> None:
        """Write down where the file is, and what lies where in it."""
        files = [str(path) for path in (*self._earlier, self.path)]
        write_note(self._sidecar, {"files": files, **whereabouts(self.path, self.segment)})
        self._laid_out = len(self.segment.layout)

    def discard(self) -> None:
        """The run is over, or a checkpoint holds it."""
        for path in (*self._earlier, self.path, self._sidecar):
            path.unlink(missing_ok=True)

    def _keep_optimizer(self, center: Center, side: int) -> dict[str, list[int]]:
        assert center.optimizer is not None
        shapes = {}
        for name, tensor in center.optimizer.state().items():
            self._tensor(f"optimizer{side}.{name}", tensor)
            shapes[name] = list(tensor.shape)
        return shapes

    def _tensor(self, name: str, value: torch.Tensor) -> None:
        if name not in self.segment.layout:
            self.segment.allocate(name, value.numel(), value.dtype)
        self.segment.tensor(name).copy_(value.reshape(-1))


def left_in(directory: Path) -> Checkpoint | None:
    """What a center that was killed has left in a run directory, if it did so on this machine since it was started."""
    told = read_note(directory / SIDECAR)
    segment = segment_of(told)
    if segment is None:
        return None
    try:
        return _read(segment, Path(told["file"]))
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
    tensors |= {
        f"optimizer.{name}": segment.tensor(f"optimizer{side}.{name}").view(shape).clone() for name, shape in shapes.items()
    }
    return Checkpoint(path, tensors, numbers)
