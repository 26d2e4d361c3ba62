"""A learner's model as a function of one replica's tensors, so that many replicas can be computed as rows of one tensor."""

from __future__ import annotations

import copy
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.func import functional_call

from paragrad.data.source import leaves
from paragrad.flat import Piece
from paragrad.learners.keras import KerasLearner
from paragrad.learners.kerasrows import KerasRowModel
from paragrad.learners.torch import TorchLearner, aligned, by_class, split
from paragrad.optim.rows import RowOptimizer, rows_of
from paragrad.types import Vector

Batchable: TypeAlias = TorchLearner | KerasLearner
"""The learners whose replicas may be computed together."""


class RowModel(Protocol):
    """What ``Stepper`` makes steps of: a loss as a function of one replica's tensors, and an optimiser for rows."""

    pieces: dict[str, list[Piece]]
    """Where each tensor lies in weights, buffers and integers."""
    optimizer: RowOptimizer
    capturable: bool
    """Whether its steps can be made a CUDA graph."""

    @property
    def paced(self) -> bool:
        """Whether the learning rate changes during a run."""

    def rate(self, progress: float, made: int) -> float:
        """The learning rate now, when so much of the run is done, and so many steps of the row."""

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""

    def clip(self, gradient: torch.Tensor) -> None:
        """Clip the gradient in each row, in place."""

    def loss(
        self, weights: list[Vector], buffers: list[Vector], integers: list[Vector], batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One replica's mean loss of a mini-batch, and what it was divided by; buffers and integers change in place."""


def row_model(learner: Batchable, device: torch.device) -> RowModel:
    """A learner's model for rows on a device; ``batchable.why_not`` says beforehand whether there is one."""
    return KerasRowModel(learner, device) if isinstance(learner, KerasLearner) else TorchRowModel(learner, device)


class TorchRowModel:
    """A torch module, by ``functional_call``."""

    capturable = True

    def __init__(self, learner: TorchLearner, device: torch.device) -> None:
        optimizer = rows_of(learner.torch_optimizer)
        assert optimizer is not None, "why_not was not asked"
        self.optimizer: RowOptimizer = optimizer
        self.pieces = learner.pieces
        self._chosen = learner.chosen
        self._names = [[piece.name for piece in self.pieces[kind]] for kind in ("weights", "buffers", "integers")]
        self._module = copy.deepcopy(learner.module).to(device).requires_grad_(False)
        self._module.train()
        self._loss = copy.deepcopy(learner.loss).to(device) if isinstance(learner.loss, nn.Module) else learner.loss

    @property
    def paced(self) -> bool:
        return self._chosen.schedule is not None

    def rate(self, progress: float, made: int) -> float:
        return self.optimizer.lr * self._chosen.factor(progress)

    @property
    def clips(self) -> bool:
        return self._chosen.clips

    def clip(self, gradient: torch.Tensor) -> None:
        self._chosen.clip_rows(gradient)

    def loss(
        self, weights: list[Vector], buffers: list[Vector], integers: list[Vector], batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = split(batch)
        state: dict[str, torch.Tensor] = {}
        for names, tensors in zip(self._names, (weights, buffers, integers), strict=True):
            state |= dict(zip(names, tensors, strict=True))
        if isinstance(inputs, dict):
            output = functional_call(self._module, state, (), inputs)
        else:
            output = functional_call(self._module, state, inputs if isinstance(inputs, tuple) else (inputs,))
        target = aligned(output, target, self._loss)
        return self._loss(output, target), self._normaliser(target)

    def _normaliser(self, target: Any) -> torch.Tensor:
        """As ``learners.torch.normaliser``, of one row, without looking at the values."""
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
