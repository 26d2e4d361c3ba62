"""The center's state in two buffers and a flip: readers find a consistent state even if the writer is killed."""

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
"""Called with name, length and dtype; returns zeros. Engines pass a function that returns shared memory."""


def private(name: str, length: int, dtype: torch.dtype) -> Vector:
    """Allocate memory of this process."""
    return torch.zeros(length, dtype=dtype)


@dataclass
class State:
    """One of the two buffers."""

    value: Vector
    buffers: Vector
    integers: Vector
    slots: dict[str, Vector]
    numbers: npt.NDArray[np.int64]
    """The clock, then the last applied sequence of each worker; other processes may read them."""
    clock: int = 0
    """Updates applied so far."""
    movers: dict[int, Callable[[float], bool]] = field(default_factory=dict)
    """Function per worker that adds its movement to the other buffer and writes the result here; see ``Center.homes``."""

    def last(self, worker: int) -> int:
        """Return the sequence of the worker's last applied commit."""
        return self.numbers.item(1 + worker)

    def load(self, snapshot: CenterSnapshot) -> None:
        """Copy a snapshot into this buffer."""
        self.value.copy_(snapshot.value)
        self.buffers.copy_(snapshot.buffers)
        self.integers.copy_(snapshot.integers)
        for name, slot in self.slots.items():
            slot.copy_(snapshot.slots[name])
        self.clock = snapshot.numbers.clock
        self.numbers[:] = [self.clock, *snapshot.numbers.ledger]


class TwoBuffers:
    """The current state and the spare one, which is written next. ``control`` counts the flips and announces a write."""

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
        buffers = start.new_empty(0) if buffers is None else buffers
        integers = torch.empty(0, dtype=torch.int64) if integers is None else integers
        # Single numbers are read often: through a NumPy view that is ten times as fast as through torch.
        self.control = allocate("control", 2, torch.int64).numpy()
        self.both = [
            State(
                value=allocate(f"value{i}", start.numel(), start.dtype),
                buffers=allocate(f"buffers{i}", buffers.numel(), start.dtype),
                integers=allocate(f"integers{i}", integers.numel(), torch.int64),
                slots={name: allocate(f"{name}{i}", start.numel(), start.dtype) for name in slots},
                numbers=allocate(f"numbers{i}", 1 + workers, torch.int64).numpy(),
            )
            for i in (0, 1)
        ]
        for state in self.both:
            state.value.copy_(start)
            state.buffers.copy_(buffers)
            state.integers.copy_(integers)
        if aliased:
            self.both[1].value = self.both[0].value
        self.now = self.both[0]
        """The current state."""
        self._flips = self.control.item(0)
        self._last: list[tuple[int, int]] = []
        """Worker and sequence of the last flip's commits, which the spare's numbers do not have yet."""

    def begin(self) -> tuple[State, State]:
        """Return the current state and the spare one to write to. From now on, readers of the spare must retry."""
        self.control[1] = self._flips + 2
        return self.now, self._spare

    def flip(self, commits: Sequence[Commit]) -> None:
        """Make the spare, whose value and slots are written, the current state: one number changes."""
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
        """Continue from the present contents of the memory, which were copied from another center."""
        self._flips = self.control.item(0)
        self.now = self.both[self._flips & 1]
        for state in self.both:
            state.clock = state.numbers.item(0)
        self._last = list(enumerate(self.now.numbers[1:].tolist()))

    @property
    def _spare(self) -> State:
        return self.both[1] if self.now is self.both[0] else self.both[0]
