"""The center's state in two buffers and a flip: whoever reads it, whenever its writer is killed, finds one whole state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from paragrad.core.snapshot import CenterSnapshot
from paragrad.types import Commit, Vector

Allocate: TypeAlias = Callable[[str, int, torch.dtype], Vector]
"""(name, length, dtype) -> zeros; an engine gives shared memory here."""


def private(name: str, length: int, dtype: torch.dtype) -> Vector:
    """Ordinary memory of this process."""
    return torch.zeros(length, dtype=dtype)


@dataclass
class State:
    """One of the two buffers."""

    value: Vector
    buffers: Vector
    integers: Vector
    slots: dict[str, Vector]
    numbers: npt.NDArray[np.int64]
    """The clock, then the last applied sequence of each worker: for those who share this memory."""
    clock: int = 0
    """Updates applied so far."""
    movers: dict[int, Callable[[float], bool]] = field(default_factory=dict)
    """How each worker's movement is added to the other buffer and written here, where the center has the weights themselves."""

    def last(self, worker: int) -> int:
        """The sequence of the worker's last applied commit."""
        return self.numbers.item(1 + worker)

    def load(self, snapshot: CenterSnapshot) -> None:
        """Continue from a snapshot."""
        self.value.copy_(snapshot.value)
        self.buffers.copy_(snapshot.buffers)
        self.integers.copy_(snapshot.integers)
        for name, slot in self.slots.items():
            slot.copy_(snapshot.slots[name])
        self.clock = snapshot.numbers.clock
        self.numbers[:] = [self.clock, *snapshot.numbers.ledger]


class TwoBuffers:
    """The state that is read, and the one that is written next. ``control`` counts the flips, and announces a write."""

    def __init__(
        self,
        start: Vector,
        buffers: Vector | None,
        integers: Vector | None,
        *,
        slots: Sequence[str],
        workers: int,
        aliased: bool,
        allocate: Allocate,
    ) -> None:
        # Numbers are looked at all the time: NumPy's view of the same memory does that ten times as fast as torch's.
        self.control = allocate("control", 2, torch.int64).numpy()
        self.both = [
            State(
                value=allocate(f"value{i}", start.numel(), start.dtype),
                buffers=allocate(f"buffers{i}", 0 if buffers is None else buffers.numel(), start.dtype),
                integers=allocate(f"integers{i}", 0 if integers is None else integers.numel(), torch.int64),
                slots={name: allocate(f"{name}{i}", start.numel(), start.dtype) for name in slots},
                numbers=allocate(f"numbers{i}", 1 + workers, torch.int64).numpy(),
            )
            for i in (0, 1)
        ]
        for state in self.both:
            state.value.copy_(start)
            if buffers is not None:
                state.buffers.copy_(buffers)
            if integers is not None:
                state.integers.copy_(integers)
        if aliased:
            self.both[1].value = self.both[0].value
        self.now = self.both[0]
        """The state that is read."""
        self._flips = self.control.item(0)
        self._last: list[tuple[int, int]] = []
        """Worker and sequence of the last flip's commits: all that the spare's numbers lack."""

    def begin(self) -> tuple[State, State]:
        """The state now, and the spare one to write the next into: from here on a reader of the spare must try again."""
        self.control[1] = self._flips + 2
        return self.now, self._spare

    def flip(self, commits: Sequence[Commit]) -> None:
        """The spare, its value and slots written, becomes the state that is read: one number is moved."""
        spare = self._spare
        numbers, now = spare.numbers, [(commit.worker, commit.sequence) for commit in commits]
        for worker, sequence in self._last + now:
            numbers[1 + worker] = sequence
        spare.clock = numbers[0] = self.now.clock + 1
        self._last = now
        self._flips += 1
        self.control[0] = self._flips
        self.now = spare

    def load(self, snapshot: CenterSnapshot) -> None:
        """Continue from a snapshot."""
        for state in self.both:
            state.load(snapshot)
        self._last = []

    def take_up(self) -> None:
        """Go on from what the memory holds by now: it was copied from another's."""
        self._flips = self.control.item(0)
        self.now = self.both[self._flips & 1]
        for state in self.both:
            state.clock = state.numbers.item(0)
        self._last = list(enumerate(self.now.numbers[1:].tolist()))

    @property
    def _spare(self) -> State:
        return self.both[1] if self.now is self.both[0] else self.both[0]
