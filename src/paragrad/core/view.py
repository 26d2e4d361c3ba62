"""The center's next state as a scheme sees it inside ``apply``: the whole vector or one block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from paragrad.core import kernels
from paragrad.core.replica import Slots
from paragrad.core.state import State
from paragrad.errors import UsageError
from paragrad.types import Commit, Paced, Vector

if TYPE_CHECKING:
    from paragrad.core.center import Center


class NotFinite(Exception):
    """The mean of the commits is not finite; the center has not changed."""


@dataclass
class View:
    """Implements ``types.CenterView`` for elements ``lo`` to ``hi``."""

    center: Center
    now: State
    spare: State
    lo: int
    hi: int
    twin: Vector | None = field(default=None, init=False)
    """The answer to a single commit, written in the same pass as the value."""
    _written: int = field(default=-1, init=False)
    _touched: bool = field(default=False, init=False)
    _finite: bool = field(default=True, init=False)
    _slots: Slots | None = field(default=None, init=False)

    @property
    def workers(self) -> int:
        return self.center.workers

    @property
    def clock(self) -> int:
        return self.now.clock

    @property
    def live(self) -> int:
        return len(self.center.live)

    @property
    def working(self) -> list[int]:
        return self.center.working

    @property
    def speeds(self) -> list[float]:
        return self.center.ledger.speeds

    @property
    def counts(self) -> list[int]:
        return self.center.ledger.commits

    @property
    def handed(self) -> list[Vector]:
        return [answer[self.lo : self.hi] for answer in self.center.answers]

    @property
    def value(self) -> Vector:
        mine = self.spare.value[self.lo : self.hi]
        if not self._touched:
            self._touched = True
            if self.spare.value is not self.now.value:
                mine.copy_(self.now.value[self.lo : self.hi])
        return mine

    @value.setter
    def value(self, new: Vector) -> None:
        mine = self.spare.value[self.lo : self.hi]
        self._touched = True
        if new.data_ptr() != mine.data_ptr():
            mine.copy_(new)

    @property
    def slots(self) -> Slots:
        if self._slots is None:
            mine = {name: slot[self.lo : self.hi] for name, slot in self.spare.slots.items()}
            for name, slot in mine.items():
                slot.copy_(self.now.slots[name][self.lo : self.hi])
            self._slots = Slots(mine)
        return self._slots

    def add(self, vector: Vector, scale: float = 1.0) -> None:
        mine = self.spare.value[self.lo : self.hi]
        base = mine if self._touched else self.now.value[self.lo : self.hi]
        self._finite = kernels.add(mine, base, vector, scale, self.twin)
        self._touched, self._written = True, mine._version

    def approach(self, vector: Vector, share: float) -> Vector:
        mine = self.spare.value[self.lo : self.hi]
        base = mine if self._touched else self.now.value[self.lo : self.hi]
        force = torch.empty_like(mine)
        self._finite = kernels.approach(mine, force, base, vector, share)
        self._touched, self._written = True, mine._version
        return force

    def mean(self, commits: Sequence[Commit]) -> Vector:
        total = sum(commit.weight for commit in commits)
        if total <= 0:
            return torch.zeros_like(commits[0].value)
        if len(commits) == 1:
            mean = commits[0].value
            sound = kernels.finite(mean)
        else:
            first, second, *others = commits
            mean = self.center.scratch[self.lo : self.hi]
            sound = kernels.blend(mean, first.value, first.weight / total, second.value, second.weight / total)
            for commit in others:
                sound = kernels.blend(mean, mean, 1.0, commit.value, commit.weight / total)
        if not sound:
            raise NotFinite
        return mean

    def step(self, gradient: Vector, scale: float = 1.0) -> None:
        if self.center.optimizer is None:
            raise UsageError(f"{type(self.center.scheme).__name__} steps at the center, but the center has no optimiser.")
        value = self.value
        self.center.stepped = True
        self._written = -1  # the optimiser's writes do not change torch's version counter
        if isinstance(self.center.optimizer, Paced):
            self.center.optimizer.set_progress(self.center.progress)
        self.center.optimizer.step(value, gradient, scale)

    @property
    def twinned(self) -> bool:
        """True if the twin still equals the value: torch counts every in-place change."""
        return self.twin is not None and self._written == self.spare.value._version

    @property
    def finite(self) -> bool:
        """True if the next value is finite; checked again only if it changed after the pass that wrote it."""
        if self._written == self.spare.value._version:
            return self._finite
        return kernels.finite(self.spare.value[self.lo : self.hi])

    def settle(self) -> None:
        """Copy the value and the slots from the current state, if the scheme did not use them."""
        _ = self.value, self.slots
