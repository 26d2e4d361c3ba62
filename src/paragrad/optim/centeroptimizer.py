"""The user's optimiser on the center's value, for schemes that ship gradients."""

from __future__ import annotations

from paragrad.optim.optimizer import FlatOptimizer, Named
from paragrad.types import Vector


class CenterOptimizer(FlatOptimizer):
    """The user's optimiser on the center's value: on shaped views if the optimiser depends on shapes."""

    def step(self, vector: Vector, gradient: Vector, scale: float = 1.0) -> None:
        """Make one step on ``vector``, in place."""
        if self.chosen.clips:
            gradient = gradient.clone()  # it may belong to a worker, and others may read it
            self._set_gradients(gradient)
            self.chosen.clip([piece.tensor for piece in self._weights.pieces])
        if self.whole is not None:
            self.whole.data = vector
            self.whole.grad = gradient
        else:
            self._weights.move_to(vector)
            self._set_gradients(gradient)
        rates = [group["lr"] for group in self.torch.param_groups]
        for group, rate in zip(self.torch.param_groups, rates, strict=True):
            group["lr"] = rate * scale
        self.torch.step()
        for group, rate in zip(self.torch.param_groups, rates, strict=True):
            group["lr"] = rate

    def _set_gradients(self, gradient: Vector) -> None:
        for piece, view in zip(self._weights.pieces, self._weights.views(gradient), strict=True):
            piece.tensor.grad = view

    @property
    def is_flat(self) -> bool:
        """True if the optimiser steps on one vector, and not on the tensors in it."""
        return self.whole is not None

    @property
    def why_whole(self) -> str | None:
        """Why the optimiser cannot step on a slice of the vector; None if it can."""
        if self.chosen.clip_norm is not None:
            return "clip_norm needs the norm of the whole gradient (use clip_value)"
        if any(group.get("fused") for group in self.torch.param_groups):
            return "fused=True rounds the last elements of a tensor differently from the rest (leave it out)"
        return self.why_shapes

    @property
    def has_name(self) -> bool:
        """True if optimiser and schedule were chosen by name, so that another machine can make the same ones."""
        return isinstance(self.chosen.optimizer, Named) and isinstance(self.chosen.schedule, str | None)
