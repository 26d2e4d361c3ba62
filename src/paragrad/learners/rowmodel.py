"""A learner's model as a function of one replica's tensors, for computing many replicas as rows of one tensor."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.func import functional_call

from paragrad.core.flat import Piece
from paragrad.data.source import leaves
from paragrad.learners.batch import split
from paragrad.learners.criterion import aligned, by_class
from paragrad.learners.keras import KerasLearner
from paragrad.learners.kerasrows import KerasRowModel
from paragrad.learners.torch import TorchLearner
from paragrad.optim.pieces import flattened, shaped
from paragrad.optim.rows import RowOptimizer, rows_of
from paragrad.types import Vector

Batchable: TypeAlias = TorchLearner | KerasLearner
"""Learners whose replicas may be computed together."""


class RowModel(Protocol):
    """A loss as a function of one replica's tensors, and an optimiser for rows; used by ``Stepper``."""

    pieces: dict[str, list[Piece]]
    """Positions of the tensors in weights, buffers and integers."""
    optimizer: RowOptimizer
    capturable: bool
    """True if its steps can be captured as a CUDA graph."""
    paced: bool
    """True if the learning rate changes during a run."""
    clips: bool
    """True if gradients are clipped."""

    def rate(self, progress: float, made: int) -> float:
        """Return the learning rate at this progress of the run, after ``made`` steps of the row."""

    def clip(self, gradient: torch.Tensor) -> None:
        """Clip the gradient in each row, in place."""

    def state(self, slots: list[Vector], made: int) -> dict[str, torch.Tensor]:
        """Return a row's optimiser state in the learner's form, from its vectors and the number of its steps."""

    def slots(self, state: Mapping[str, torch.Tensor]) -> tuple[list[Vector], int]:
        """Return vectors and number of steps; the inverse of ``state``."""

    def loss(
        self, weights: list[Vector], buffers: list[Vector], integers: list[Vector], batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one replica's mean loss and the divisor of the mean; change buffers and integers in place."""


def row_model(learner: Batchable, device: torch.device) -> RowModel:
    """Return a learner's model for rows on a device; ask ``batchable.why_not`` first."""
    return KerasRowModel(learner, device) if isinstance(learner, KerasLearner) else TorchRowModel(learner, device)


class TorchRowModel:
    """A torch module, called by ``functional_call``."""

    capturable = True

    def __init__(self, learner: TorchLearner, device: torch.device) -> None:
        optimizer = rows_of(learner.torch_optimizer)
        assert optimizer is not None, "call why_not first"
        self.optimizer: RowOptimizer = optimizer
        self.pieces = learner.pieces
        self._chosen = learner.chosen
        self.paced = self._chosen.schedule is not None
        self.clips = self._chosen.clips
        self._flat = learner.optimizer_is_flat
        self._shapes = [piece.tensor.shape for piece in learner.pieces["weights"]]
        self._names = [piece.name for kind in ("weights", "buffers", "integers") for piece in self.pieces[kind]]
        self._module = copy.deepcopy(learner.module).to(device).requires_grad_(False)
        self._module.train()
        self._loss = copy.deepcopy(learner.loss).to(device) if isinstance(learner.loss, nn.Module) else learner.loss

    def rate(self, progress: float, made: int) -> float:
        return self.optimizer.lr * self._chosen.factor(progress)

    def clip(self, gradient: torch.Tensor) -> None:
        self._chosen.clip_rows(gradient)

    def state(self, slots: list[Vector], made: int) -> dict[str, torch.Tensor]:
        if not slots or made == self.optimizer.made:
            return {}
        state = {f"0.{name}": slot for name, slot in zip(self.optimizer.names, slots, strict=True)}
        if self.optimizer.counts:
            state["0.step"] = torch.tensor(float(made))  # torch counts in its default type, too
        return state if self._flat else dict(shaped(state, self._shapes))

    def slots(self, state: Mapping[str, torch.Tensor]) -> tuple[list[Vector], int]:
        names = [f"0.{name}" for name in self.optimizer.names]
        counted = {"0.step": False} if self.optimizer.counts else {}
        flat = flattened(state, self._shapes, {**dict.fromkeys(names, True), **counted})
        return [flat[name] for name in names], int(flat["0.step"]) if counted else 1

    def loss(
        self, weights: list[Vector], buffers: list[Vector], integers: list[Vector], batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = split(batch)
        state = dict(zip(self._names, [*weights, *buffers, *integers], strict=True))
        if isinstance(inputs, dict):
            output = functional_call(self._module, state, (), inputs)
        else:
            output = functional_call(self._module, state, inputs if isinstance(inputs, tuple) else (inputs,))
        target = aligned(output, target, self._loss)
        return self._loss(output, target), self._normaliser(target)

    def _normaliser(self, target: Any) -> torch.Tensor:
        """Return ``criterion.normaliser`` of one row, without reading values, which vmap does not allow."""
        first = leaves(target)[0]
        if not first.ndim:
            return first.new_ones((), dtype=torch.float64)
        if by_class(self._loss) and not first.is_floating_point():
            here = first != getattr(self._loss, "ignore_index", -100)
            weight = getattr(self._loss, "weight", None)
            if weight is None:
                return here.sum(dtype=torch.float64)
            return torch.where(here, weight[torch.where(here, first, 0)], 0.0).sum(dtype=torch.float64)
        return first.new_full((), float(first.shape[0]), dtype=torch.float64)
