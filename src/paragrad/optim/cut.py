"""The center's optimiser for a slice of the vector. Its state has two sides, as the value has; ``flip`` switches sides."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from paragrad.core.flat import Flat
from paragrad.core.state import Allocate, private
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.optimizer import OptimizerLike
from paragrad.optim.pieces import flattened, shaped
from paragrad.types import Vector

FLAGS = "optimizer"
"""Name of the vector that tells, for each side, whether there is a state: some optimisers start without one."""


def side_name(name: str, side: int, *, each: bool) -> str:
    """Return the name of a state tensor in memory; ``each``: it has one number per element, else one for all."""
    return f"{'optimizer' if each else 'number'}{side}.{name}"


def kept(optimizer: OptimizerLike, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the state that an optimiser keeps for a vector of one element."""
    probe = _of_vector(optimizer, 1, dtype)
    probe.step(torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype))
    return probe.state()


class CutOptimizer:
    """An optimiser whose steps can be discarded: call ``begin``, then ``step``, then ``flip``, or ``begin`` again."""

    def __init__(
        self,
        optimizer: OptimizerLike,
        length: int,
        dtype: torch.dtype,
        allocate: Allocate = private,
        whole: CenterOptimizer | None = None,
    ) -> None:
        """``whole``: the optimiser of the whole vector, if it is known."""
        self._inner = _of_vector(optimizer, length, dtype)
        self._whole = whole
        self._like = kept(optimizer, dtype)
        self._flags = allocate(FLAGS, 2, torch.int64).numpy()
        self._sides = [
            {name: _room(allocate, side_name(name, side, each=bool(t.ndim)), length, t) for name, t in self._like.items()}
            for side in (0, 1)
        ]
        self._now = 0
        self.load(self._inner.state())

    def begin(self) -> None:
        """Discard steps that were not flipped; the next step starts from the current state."""
        now, spare = self._now, 1 - self._now
        self._flags[spare] = self._flags[now]
        if not self._flags[now]:
            self._inner.forget()
            return
        for name, room in self._sides[spare].items():
            room.copy_(self._sides[now][name])
        self._inner.adopt(self._sides[spare])

    def set_progress(self, progress: float) -> None:
        """Set the learning rate for this share of the run."""
        self._inner.set_progress(progress)

    def step(self, vector: Vector, gradient: Vector, scale: float = 1.0) -> None:
        """Make one step on the slice, in place."""
        self._inner.step(vector, gradient, scale)
        spare = 1 - self._now
        for name, tensor in self._inner.state().items():
            room = self._sides[spare][name]
            if tensor.data_ptr() != room.data_ptr():  # the first step allocates new tensors
                room.copy_(tensor)
        self._flags[spare] = bool(self._like)

    def flip(self) -> None:
        """Accept the steps since ``begin``."""
        self._now = 1 - self._now

    def take_up(self, side: int) -> None:
        """Continue from the state in memory, of which this side is the current one."""
        self._now = side

    def state(self) -> dict[str, torch.Tensor]:
        """Return the current state as named tensors; numbers for all elements have no dimension."""
        return dict(self._sides[self._now]) if self._flags[self._now] else {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a state of the same slice; an empty state changes nothing."""
        if not state:
            return
        for side in self._sides:
            for name, room in side.items():
                room.copy_(state[name].view(room.shape))
        self._flags[:] = 1

    # -- the whole ------------------------------------------------------------------------------------------

    @property
    def whole(self) -> CenterOptimizer:
        """Optimiser of the whole vector, in its state at the time of the cut."""
        assert self._whole is not None
        return self._whole

    def of_whole(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the state of the whole optimiser as that of one flat vector, which can be cut."""
        return flattened(state, self.whole.shapes, {name: bool(tensor.ndim) for name, tensor in self._like.items()})

    def to_whole(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the state of one flat vector in the form of the whole optimiser."""
        return dict(state if self.whole.is_flat else shaped(state, self.whole.shapes))


def _room(allocate: Allocate, name: str, length: int, like: torch.Tensor) -> torch.Tensor:
    return allocate(name, length, like.dtype) if like.ndim else allocate(name, 1, like.dtype).view(())


def _of_vector(optimizer: OptimizerLike, length: int, dtype: torch.dtype) -> CenterOptimizer:
    module, value = nn.Module(), nn.Parameter(torch.zeros(length, dtype=dtype))
    module.register_parameter("value", value)
    return CenterOptimizer(optimizer, module, Flat([("value", value)]))
