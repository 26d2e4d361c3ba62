"""The user's optimiser on the center's value, for schemes that ship gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from paragrad.core.flat import Flat
from paragrad.optim.choice import Optimizer
from paragrad.optim.optimizer import FlatOptimizer, Named, OptimizerLike
from paragrad.optim.pieces import shaped
from paragrad.types import Vector


class CenterOptimizer:
    """The user's optimiser on the center's value: shaped views where the optimiser looks at shapes."""

    def __init__(self, optimizer: OptimizerLike, module: nn.Module, weights: Flat) -> None:
        self._weights = weights
        self._inner = FlatOptimizer(optimizer, module, weights)

    def set_progress(self, progress: float) -> None:
        """Take the learning rates for this share of the run."""
        self._inner.set_progress(progress)

    def step(self, vector: Vector, gradient: Vector, scale: float = 1.0) -> None:
        """One step on ``vector``, in place."""
        inner = self._inner
        if inner.chosen.clips:
            gradient = gradient.clone()  # it may be a worker's own, which others read
            for piece, view in zip(self._weights.pieces, self._weights.views(gradient), strict=True):
                piece.tensor.grad = view
            inner.chosen.clip([piece.tensor for piece in self._weights.pieces])
        if inner.whole is not None:
            inner.whole.data = vector
            inner.whole.grad = gradient
        else:
            self._weights.move_to(vector)
            for piece, view in zip(self._weights.pieces, self._weights.views(gradient), strict=True):
                piece.tensor.grad = view
        rates = [group["lr"] for group in inner.torch.param_groups]
        for group, rate in zip(inner.torch.param_groups, rates, strict=True):
            group["lr"] = rate * scale
        inner.torch.step()
        for group, rate in zip(inner.torch.param_groups, rates, strict=True):
            group["lr"] = rate

    def state(self) -> dict[str, torch.Tensor]:
        """The optimiser's state as named tensors."""
        return self._inner.state()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of ``state``; also of that of one flat vector."""
        flat = self.is_flat or self._inner.why_shapes is not None
        self._inner.load(state if flat else shaped(state, self.shapes))

    def adopt(self, state: Mapping[str, torch.Tensor]) -> None:
        """Let these tensors be the state: steps write into them."""
        self._inner.adopt(state)

    def forget(self) -> None:
        """Begin anew, as after it was made."""
        self._inner.forget()

    @property
    def chosen(self) -> Optimizer:
        """What was chosen, with schedule and clipping."""
        return self._inner.chosen

    @property
    def is_flat(self) -> bool:
        """Whether it sees one vector, and not the tensors in it."""
        return self._inner.whole is not None

    @property
    def shapes(self) -> list[torch.Size]:
        """Of the tensors that lie in the vector."""
        return [piece.tensor.shape for piece in self._weights.pieces]

    @property
    def why_whole(self) -> str | None:
        """Why it cannot be had for a slice of the vector; None where it can."""
        if self.chosen.clip_norm is not None:
            return "clip_norm needs the norm of the whole gradient (take clip_value)"
        if any(group.get("fused") for group in self._inner.torch.param_groups):
            return "fused=True rounds the last elements of a tensor in another way than the rest (leave it out)"
        return self._inner.why_shapes

    @property
    def has_name(self) -> bool:
        """Whether it was chosen in words alone, which another machine can be told."""
        return isinstance(self.chosen.optimizer, Named) and isinstance(self.chosen.schedule, str | None)
