"""Any torch module as a learner: its parameters are views of one vector, its steps are plain PyTorch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from paragrad.data.source import Source, all_rows, mapped
from paragrad.errors import UsageError
from paragrad.flat import Flat, floating_buffers, integer_buffers, trained
from paragrad.learners.learner import Step
from paragrad.optim.optimizer import CenterOptimizer, FlatOptimizer, OptimizerLike, factory
from paragrad.types import Vector

Loss: TypeAlias = Callable[[Any, Any], torch.Tensor]
Metric: TypeAlias = Callable[[Any, Any], Any]

TARGETS = ("y", "target", "targets", "label", "labels")
"""Keys of a dict batch that hold what is to be predicted."""


class TorchLearner:
    """One nn.Module with its loss and optimiser. The module given is copied; ``module`` is the learner's own."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        optimizer: OptimizerLike,
        *,
        metrics: Mapping[str, Metric] | None = None,
        device: str = "cpu",
    ) -> None:
        self.module = copy.deepcopy(module).to(device)
        self.device = torch.device(device)
        self.loss = copy.deepcopy(loss).to(device) if isinstance(loss, nn.Module) else loss
        self.metrics = dict(metrics or {})
        self._make = factory(optimizer)
        self._weights = Flat(trained(self.module))
        self._buffers = Flat(floating_buffers(self.module), kind="buffer")
        self._integers = Flat(integer_buffers(self.module), kind="buffer")
        self._optimizer = FlatOptimizer(self._make, self.module, self._weights)
        self.module.train()

    # -- the vectors ----------------------------------------------------------------------------------------

    @property
    def weights(self) -> Vector:
        """All trained parameters."""
        return self._weights.vector

    @property
    def buffers(self) -> Vector:
        """Batch-norm statistics and the like."""
        return self._buffers.vector

    @property
    def integers(self) -> Vector:
        """Counters."""
        return self._integers.vector

    @property
    def lr(self) -> float:
        """The learning rate now."""
        return self._optimizer.lr

    def spread(self) -> bool:
        """Bring the module up to date with the vectors."""
        self._buffers.spread()
        self._integers.spread()
        return self._weights.spread()

    def collect(self) -> None:
        """Bring the vectors up to date with the module."""
        self._weights.collect()
        self._buffers.collect()
        self._integers.collect()

    def alias(self, vector: Vector) -> None:
        """Let the parameters be views of the center itself."""
        self._weights.move_to(vector)
        self._optimizer = FlatOptimizer(self._make, self.module, self._weights)

    def check(self) -> None:
        """Raise where a parameter no longer lies in the vector."""
        self._weights.check()
        self._buffers.check()

    # -- training -------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Step:
        """One step of the local optimiser."""
        result = self._backward(batch)
        self._optimizer.step()
        return result

    def gradient(self, batch: Any, out: Vector, accumulate: float = 0.0) -> Step:
        """The mean gradient of a mini-batch."""
        result = self._backward(batch)
        if not accumulate:
            self._optimizer.gather(out)
        else:
            mine = torch.empty_like(out)
            self._optimizer.gather(mine)
            out.lerp_(mine, result.weight / (accumulate + result.weight))
        return result

    def warm_up(self, batch: Any) -> None:
        """One forward and backward pass that leaves no trace."""
        buffers, integers = self.buffers.clone(), self.integers.clone()
        self._backward(batch)
        self._optimizer.clear()
        self.buffers.copy_(buffers)
        self.integers.copy_(integers)
        self.spread()
        self.check()

    def scatter(self, seed: int) -> None:
        """Move to a random point: every submodule draws its parameters anew."""
        generator_state = torch.get_rng_state()
        torch.manual_seed(seed)
        for child in self.module.modules():
            reset = getattr(child, "reset_parameters", None)
            if callable(reset):
                reset()
        torch.set_rng_state(generator_state)
        self.collect()
        self.check()

    def _backward(self, batch: Any) -> Step:
        inputs, target = split(self._moved(batch))
        self._optimizer.clear()
        output = call(self.module, inputs)
        target = aligned(output, target)
        loss = self.loss(output, target)
        if loss.ndim:
            raise UsageError(
                f"The loss returned a tensor of shape {tuple(loss.shape)}; it must return one number: use reduction='mean'."
            )
        loss.backward()
        return Step(loss=float(loss.detach()), weight=normaliser(self.loss, target))

    def _moved(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        return mapped(batch, lambda leaf: leaf.to(self.device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf)

    # -- looking --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: Source, batch_size: int) -> dict[str, float]:
        """Mean loss, accuracy where it has a meaning, and the metrics."""
        self.spread()
        self.module.eval()
        totals: dict[str, float] = {}
        weights: dict[str, float] = {}
        try:
            for rows in all_rows(source, batch_size):
                inputs, target = split(self._moved(source.batch(rows)))
                output = call(self.module, inputs)
                target = aligned(output, target)
                found = {"loss": (float(self.loss(output, target)), normaliser(self.loss, target))}
                right = accuracy(self.loss, output, target)
                if right is not None:
                    found["accuracy"] = (right, float(len(rows)))
                for name, metric in self.metrics.items():
                    found[name] = (float(metric(output, target)), float(len(rows)))
                for name, (value, weight) in found.items():
                    totals[name] = totals.get(name, 0.0) + value * weight
                    weights[name] = weights.get(name, 0.0) + weight
        finally:
            self.module.train()
        return {name: totals[name] / weights[name] if weights[name] else math.nan for name in totals}

    def state(self) -> dict[str, torch.Tensor]:
        """The local optimiser's state."""
        return self._optimizer.state()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of ``state``."""
        self._optimizer.load(state)

    def center_optimizer(self) -> CenterOptimizer:
        """The same optimiser for the center, on a copy of the module in the center's own type."""
        module = copy.deepcopy(self.module).to("cpu", self.weights.dtype)
        return CenterOptimizer(self._make, module, Flat(trained(module)))


# -- what a batch is, and what a loss means by it ---------------------------------------------------------------


def split(batch: Any) -> tuple[Any, Any]:
    """(inputs, target): the last of a tuple, the target key of a dict; a lone tensor is its own target."""
    if isinstance(batch, dict):
        key = next((k for k in TARGETS if k in batch), None)
        if key is None:
            raise UsageError(f"A dict batch needs its target under one of {', '.join(TARGETS)}; it has {', '.join(map(str, batch))}.")
        return {k: v for k, v in batch.items() if k != key}, batch[key]
    if isinstance(batch, tuple | list):
        if len(batch) == 1:
            return batch[0], batch[0]
        return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
    return batch, batch


def call(module: nn.Module, inputs: Any) -> Any:
    """A module on one input, several, or named ones."""
    if isinstance(inputs, dict):
        return module(**inputs)
    if isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)


def aligned(output: Any, target: Any) -> Any:
    """A float output of shape (B, 1) against labels of shape (B,): torch would broadcast them into (B, B)."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return target
    if output.numel() == target.numel() and output.shape != target.shape:
        target = target.reshape(output.shape)
    if output.shape == target.shape and not target.is_floating_point():
        target = target.to(output.dtype)
    return target


def normaliser(loss: Any, target: Any) -> float:
    """What the loss divides by: rows, or the class weights of these rows, or the targets that are not ignored."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and isinstance(target, torch.Tensor):
        if not target.is_floating_point():
            counted = target[target != loss.ignore_index] if (target == loss.ignore_index).any() else target
            if loss.weight is not None:
                return float(loss.weight[counted].sum())
            return float(counted.numel())
    if isinstance(target, torch.Tensor):
        return float(target.shape[0]) if target.ndim else 1.0
    return float(len(target)) if hasattr(target, "__len__") else 1.0


def accuracy(loss: Any, output: Any, target: Any) -> float | None:
    """The share of right answers, or None where that has no meaning (regression)."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    if not target.is_floating_point() and output.ndim == target.ndim + 1:
        classes = output.argmax(1)
        return float((classes == target).float().mean())
    if isinstance(loss, nn.BCEWithLogitsLoss) or loss is nn.functional.binary_cross_entropy_with_logits:
        return float(((output > 0) == (target > 0.5)).float().mean())
    if isinstance(loss, nn.BCELoss):
        return float(((output > 0.5) == (target > 0.5)).float().mean())
    return None
