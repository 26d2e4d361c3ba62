"""The center's optimiser of a slice of the vector. Its state lies twice, as the value does: steps count once flipped to."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import nn

from paragrad.core.flat import Flat
from paragrad.core.state import Allocate, private
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.optimizer import OptimizerLike
from paragrad.optim.pieces import flattened, shaped
from paragrad.types import Vector

FLAGS = "optimizer"
"""The name of what says, of each side, whether there is a state: some begin without one."""


def side_name(name: str, side: int, *, each: bool) -> str:
    """What a tensor of the state is called where it lies: one for each element, or one for all."""
    return f"{'optimizer' if each else 'number'}{side}.{name}"


def kept(optimizer: OptimizerLike, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The state that it keeps of a vector, as seen of one of a single element."""
    probe = _of_vector(optimizer, 1, dtype)
    probe.step(torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype))
    return probe.state()


class CutOptimizer:
    """``begin``, then any number of steps, then ``flip``; or ``begin`` again, and those steps are forgotten."""

    def __init__(
        self,
        optimizer: OptimizerLike,
        length: int,
        dtype: torch.dtype,
        allocate: Allocate = private,
        whole: CenterOptimizer | None = None,
    ) -> None:
        """``whole``: what it was cut from, where that is known."""
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
        """From here on steps go from the state that holds."""
        now, spare = self._now, 1 - self._now
        self._flags[spare] = self._flags[now]
        if not self._flags[now]:
            self._inner.forget()
            return
        for name, room in self._sides[spare].items():
            room.copy_(self._sides[now][name])
        self._inner.adopt(self._sides[spare])

    def set_progress(self, progress: float) -> None:
        """Take the learning rate for this share of the run."""
        self._inner.set_progress(progress)

    def step(self, vector: Vector, gradient: Vector, scale: float = 1.0) -> None:
        """One step on the slice, in place."""
        self._inner.step(vector, gradient, scale)
        spare = 1 - self._now
        for name, tensor in self._inner.state().items():
            room = self._sides[spare][name]
            if tensor.data_ptr() != room.data_ptr():  # a first step makes tensors of its own
                room.copy_(tensor)
        self._flags[spare] = bool(self._like)

    def flip(self) -> None:
        """The steps since ``begin`` hold."""
        self._now = 1 - self._now

    def take_up(self, side: int) -> None:
        """Go on from what the memory holds by now, of which this side holds."""
        self._now = side

    def state(self) -> dict[str, torch.Tensor]:
        """The state that holds, as named tensors; numbers for all elements have no dimension."""
        return dict(self._sides[self._now]) if self._flags[self._now] else {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse, of the same slice; where there is none it stays as it is."""
        for side in self._sides if state else ():
            for name, room in side.items():
                room.copy_(state[name].view(room.shape))
        if state:
            self._flags[:] = 1

    # -- the whole ------------------------------------------------------------------------------------------

    @cached_property
    def _shapes(self) -> list[torch.Size]:
        assert self._whole is not None
        return self._whole.shapes

    @property
    def whole(self) -> CenterOptimizer:
        """What it was cut from, in the state in which it was then."""
        assert self._whole is not None
        return self._whole

    def of_whole(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The state of the whole as that of one flat vector, which can be cut."""
        return flattened(state, self._shapes, {name: bool(tensor.ndim) for name, tensor in self._like.items()})

    def to_whole(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inverse: as the one that it was cut from has it."""
        return dict(state if self.whole.is_flat else shaped(state, self._shapes))


def _room(allocate: Allocate, name: str, length: int, like: torch.Tensor) -> torch.Tensor:
    return allocate(name, length, like.dtype) if like.ndim else allocate(name, 1, like.dtype).view(())


class _Alone(nn.Module):
    """A vector that an optimiser can be made for."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(length, dtype=dtype))


def _of_vector(optimizer: OptimizerLike, length: int, dtype: torch.dtype) -> CenterOptimizer:
    module = _Alone(length, dtype)
    return CenterOptimizer(optimizer, module, Flat([("value", module.value)]))
