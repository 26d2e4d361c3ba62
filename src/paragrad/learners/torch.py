"""Any torch module as a learner: its parameters are views of one vector, its steps are plain PyTorch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from paragrad.data.source import TARGETS as TARGETS
from paragrad.data.source import Source, Weighted, all_rows, leaves, mapped, target_key
from paragrad.errors import UsageError
from paragrad.flat import Flat, floating_buffers, integer_buffers, trained
from paragrad.learners.flattened import Flattened
from paragrad.learners.learner import Step
from paragrad.learners.looks import Looks
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.choice import Optimizer
from paragrad.optim.optimizer import FlatOptimizer, OptimizerLike, prepared
from paragrad.types import Vector

Loss: TypeAlias = Callable[[Any, Any], torch.Tensor]
Metric: TypeAlias = Callable[[Any, Any], Any]

BY_CLASS = (nn.functional.cross_entropy, nn.functional.nll_loss)


class TorchLearner(Flattened):
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
        if not isinstance(module, nn.Module):
            raise UsageError(f"The model is a {type(module).__name__}, but it must be a torch.nn.Module.")
        trained(module)
        _refuse_loss(loss)
        self.module = copy.deepcopy(module).to(device)
        self.device = torch.device(device)
        self.loss = copy.deepcopy(loss).to(device) if isinstance(loss, nn.Module) else loss
        self.metrics = dict(metrics or {})
        self._chosen = prepared(optimizer)
        super().__init__(trained(self.module), floating_buffers(self.module), integer_buffers(self.module))
        kept = {id(piece.tensor) for piece in (*self._buffers.pieces, *self._integers.pieces)}
        self._places = [
            (child, name, buffer)
            for child in self.module.modules()
            for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False)
            if id(buffer) in kept
        ]
        self._optimizer = FlatOptimizer(self._chosen, self.module, self._weights)
        self.module.train()

    # -- the vectors ----------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The learning rate now."""
        return self._optimizer.lr

    def set_progress(self, progress: float) -> None:
        """Take the learning rate for this share of the run."""
        self._optimizer.set_progress(progress)

    @property
    def chosen(self) -> Optimizer:
        """The optimiser as it was chosen, with schedule and clipping."""
        return self._chosen

    @property
    def searches(self) -> bool:
        """Whether the optimiser evaluates the loss at several points for one step."""
        return self._optimizer.searches

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The user's optimiser, as it was made."""
        return self._optimizer.torch

    def collect(self) -> None:
        """Bring the vectors up to date with the module."""
        for child, name, buffer in self._places:
            now = child._buffers[name]
            if now is not buffer:
                self._put_back(child, name, buffer, now)
        super().collect()

    def alias(self, vector: Vector) -> None:
        """Let the parameters be views of this vector; its contents count."""
        self._weights.move_to(vector)
        self._optimizer = FlatOptimizer(self._chosen, self.module, self._weights)

    def check(self) -> None:
        """Raise where a parameter no longer lies in the vector."""
        self.check_all(self.module.named_parameters())

    @staticmethod
    def _put_back(child: nn.Module, name: str, buffer: torch.Tensor, now: torch.Tensor | None) -> None:
        # ``self.mean = 0.9 * self.mean + ...`` in a forward pass makes a new tensor, which is not in the vector.
        if now is None or now.shape != buffer.shape:
            raise UsageError(
                f"Buffer {name!r} of {type(child).__name__} had the shape {tuple(buffer.shape)} and is now "
                f"{None if now is None else tuple(now.shape)}. Keep its shape, or register it with persistent=False."
            )
        with torch.no_grad():
            buffer.copy_(now)
        child._buffers[name] = buffer

    # -- training -------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Step:
        """One step of the local optimiser."""
        if self._optimizer.searches:
            looks = Looks(lambda: self._backward(batch), self.collect, [self._buffers, self._integers], self.device)
            self._optimizer.search(looks)
            return looks.settled(type(self.torch_optimizer).__name__)
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
        self.collect()
        weights, buffers, integers = self.weights.clone(), self.buffers.clone(), self.integers.clone()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self._backward(batch)
        self._optimizer.clear()
        self.collect()
        self.weights.copy_(weights)
        self.buffers.copy_(buffers)
        self.integers.copy_(integers)
        self.spread()
        self.check()

    @property
    def is_plain_sgd(self) -> bool:
        """Whether a step is ``w - lr * gradient`` and no more."""
        return self._optimizer.is_plain_sgd

    def recover(self) -> None:
        """Forget the optimiser's state: it has seen NaN."""
        self._optimizer.forget()

    def scatter(self, seed: int) -> None:
        """Move to a random point: every submodule that has ``reset_parameters`` draws its parameters anew."""
        before = self.weights.clone()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            for child in self.module.modules():
                reset = getattr(child, "reset_parameters", None) or getattr(child, "_reset_parameters", None)
                if callable(reset):
                    reset()
        self.collect()
        self.check()
        if torch.equal(before, self.weights):
            raise UsageError(
                f"{type(self.module).__name__} cannot start from a random point: none of its modules has reset_parameters(). "
                "Write one, or choose a scheme whose workers start together."
            )

    def _backward(self, batch: Any) -> Step:
        batch = self._moved(batch)
        inputs, target = split(batch)
        self._optimizer.clear()
        output = call(self.module, inputs)
        target = aligned(output, target, self.loss)
        weight = weight_of(batch)
        loss = self.loss(output, target) if weight is None else weighted_loss(self.loss, output, target, weight)
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"The loss returned a {type(loss).__name__}; it must return a tensor of one number.")
        if loss.ndim:
            raise UsageError(
                f"The loss returned a tensor of shape {tuple(loss.shape)}; it must return one number: use reduction='mean'."
            )
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.gathered()
        return Step(float(loss.detach()), normaliser(self.loss, target) if weight is None else float(len(weight)))

    def _moved(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        return mapped(batch, lambda leaf: leaf.to(self.device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf)

    # -- looking --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: Source, batch_size: int) -> dict[str, float]:
        """Mean loss, accuracy where it has a meaning, and the metrics; the weights of rows count in loss and accuracy."""
        self.spread()
        self.module.eval()
        totals: dict[str, float] = {}
        weights: dict[str, float] = {}
        try:
            for rows in all_rows(source, batch_size):
                batch = self._moved(source.batch(rows))
                inputs, target = split(batch)
                output = call(self.module, inputs)
                target = aligned(output, target, self.loss)
                found = sums(self.loss, output, target, weight_of(batch))
                for name, metric in self.metrics.items():
                    found[name] = (float(metric(output, target)) * len(rows), float(len(rows)))
                for name, (value, weight) in found.items():
                    totals[name] = totals.get(name, 0.0) + value
                    weights[name] = weights.get(name, 0.0) + weight
        finally:
            self.module.train()
        return {name: totals[name] / weights[name] if weights[name] else math.nan for name in totals}

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of the local optimiser's state."""
        return {name: tensor.clone() for name, tensor in self._optimizer.state().items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of ``state``."""
        self._optimizer.load(state)

    def center_optimizer(self, device: str = "cpu") -> CenterOptimizer:
        """The same optimiser for the center, on a copy of the module in the center's own type."""
        module = copy.deepcopy(self.module).to(device, self.weights.dtype)
        now = dict(trained(module))
        # In the workers' order, which goes by dtype first: here all are of one.
        pieces = [(piece.name, now[piece.name]) for piece in self._weights.pieces]
        weights = Flat(pieces, home=pieces[0][1].device)
        return CenterOptimizer(self._chosen, module, weights)


def _refuse_loss(loss: Any) -> None:
    if getattr(loss, "reduction", "mean") in ("sum", "none"):
        raise UsageError(
            f"{type(loss).__name__} has reduction={loss.reduction!r}, but workers' losses are joined as means: "
            "use reduction='mean'."
        )
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise UsageError(
            f"{type(loss).__name__} has parameters of its own, which would never be trained: make them part of the model."
        )


# -- what a batch is, and what a loss means by it ---------------------------------------------------------------


def split(batch: Any) -> tuple[Any, Any]:
    """(inputs, target): the last of a tuple, the target key of a dict; a lone tensor is its own target."""
    if isinstance(batch, Weighted):
        return split(batch.rows)
    if isinstance(batch, dict):
        key = target_key(batch)
        return {k: v for k, v in batch.items() if k != key}, batch[key]
    if isinstance(batch, tuple | list):
        if len(batch) == 1:
            return batch[0], batch[0]
        return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
    return batch, batch


def weight_of(batch: Any) -> torch.Tensor | None:
    """The weight of each row, where rows have weights."""
    return batch.weight if isinstance(batch, Weighted) else None


def weighted_loss(loss: Any, output: Any, target: Any, weight: torch.Tensor) -> torch.Tensor:
    """``sum of w_i * loss_i / rows``: not by the sum of weights, which may be 0 where some are negative."""
    each = _of_each_row(loss)(output, target)
    if not isinstance(each, torch.Tensor) or each.shape[:1] != weight.shape:
        raise UsageError(
            f"Rows have weights, but with reduction='none' {_name(loss)} returned "
            f"{getattr(each, 'shape', type(each).__name__)} for {len(weight)} rows: use a loss that returns a number for each."
        )
    flat = each.reshape(len(weight), -1)
    rows = flat.sum(1) if getattr(loss, "reduction", "mean") == "batchmean" else flat.mean(1)
    return (weight * rows).sum() / len(weight)


def _of_each_row(loss: Any) -> Loss:
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        each = copy.copy(loss)
        each.reduction = "none"  # type: ignore[assignment]
        return each
    if any(loss is function for function in vars(nn.functional).values()):
        return lambda output, target: loss(output, target, reduction="none")
    raise UsageError(
        f"Rows have weights, but {_name(loss)} gives one number for all of them. Use a loss of torch.nn, such as "
        "torch.nn.CrossEntropyLoss(), or a module of your own with an attribute reduction that it goes by ('mean' or 'none')."
    )


def _name(loss: Any) -> Any:
    return getattr(loss, "__name__", type(loss).__name__)


def call(module: nn.Module, inputs: Any) -> Any:
    """A module on one input, several, or named ones."""
    if isinstance(inputs, dict):
        return module(**inputs)
    if isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)


def aligned(output: Any, target: Any, loss: Any = None) -> Any:
    """A target in the shape of the output: torch would broadcast (B, 1) against labels of (B,) into (B, B)."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return target
    if output.shape != target.shape:
        classes = by_class(loss) and not target.is_floating_point()
        if classes or output.shape[:1] != target.shape[:1] or output.numel() != target.numel():
            return target
        target = target.reshape(output.shape)
    return target if target.is_floating_point() else target.to(output.dtype)


def counted(loss: Any, target: torch.Tensor) -> torch.Tensor:
    """The targets that the loss does not ignore."""
    if by_class(loss) and not target.is_floating_point():
        return target[target != getattr(loss, "ignore_index", -100)]
    return target


def normaliser(loss: Any, target: Any) -> float:
    """What the loss divides by: rows, or the class weights of these rows, or the targets that are not ignored."""
    first = leaves(target)[0]
    if not isinstance(first, torch.Tensor) or not first.ndim:
        return 1.0
    if by_class(loss) and not first.is_floating_point():
        mine = counted(loss, first)
        weight = getattr(loss, "weight", None)
        return float(mine.numel() if weight is None else weight[mine].sum())
    return float(first.shape[0])


def sums(loss: Any, output: Any, target: Any, weight: torch.Tensor | None) -> dict[str, tuple[float, float]]:
    """Loss and accuracy of some rows as sums, each with what it is to be divided by; no accuracy where it has no meaning."""
    if weight is None:
        divisor = normaliser(loss, target)
        found = {"loss": (float(loss(output, target)) * divisor, divisor)}
        share = accuracy(loss, output, target)
        if share is not None:
            count = float(counted(loss, target).numel())
            found["accuracy"] = (share * count, count)
        return found
    found = {"loss": (float(weighted_loss(loss, output, target, weight)) * len(weight), float(len(weight)))}
    right = _right(loss, output, target)
    if right is not None:
        here = _counts(loss, right, target).to(weight.dtype).reshape(len(weight), -1)
        mine = right.to(weight.dtype).reshape(len(weight), -1) * here
        found["accuracy"] = (float((weight * mine.mean(1)).sum()), float((weight * here.mean(1)).sum()))
    return found


def accuracy(loss: Any, output: Any, target: Any) -> float | None:
    """The share of right answers, or None where that has no meaning (regression)."""
    right = _right(loss, output, target)
    if right is None:
        return None
    right = right[_counts(loss, right, target)]
    return float(right.float().mean()) if right.numel() else 0.0


def _counts(loss: Any, right: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Which answers count: those whose target the loss does not ignore."""
    if by_class(loss) and right.shape == target.shape and not target.is_floating_point():
        return target != getattr(loss, "ignore_index", -100)
    return torch.ones_like(right, dtype=torch.bool)


def _right(loss: Any, output: Any, target: Any) -> torch.Tensor | None:
    """Which answers are right, or None where that has no meaning."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    if not target.is_floating_point() and output.ndim == target.ndim + 1:
        return output.argmax(1) == target
    if by_class(loss) and output.shape == target.shape and output.ndim > 1:
        return output.argmax(1) == target.argmax(1)
    if isinstance(loss, nn.BCEWithLogitsLoss) or loss is nn.functional.binary_cross_entropy_with_logits:
        return (output > 0) == (target > 0.5)
    if isinstance(loss, nn.BCELoss) or loss is nn.functional.binary_cross_entropy:
        return (output > 0.5) == (target > 0.5)
    return None


def by_class(loss: Any) -> bool:
    """Whether integer targets are numbers of classes to this loss."""
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or any(loss is function for function in BY_CLASS)
