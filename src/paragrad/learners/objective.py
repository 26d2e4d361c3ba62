"""The objective of a learner: a loss of (output, target), a loss of (model, batch), or the loss that a model returns."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from paragrad.data.source import TARGETS, Source, Weighted, leaves
from paragrad.errors import UsageError
from paragrad.learners.batch import call, fitting, split, weight_of
from paragrad.learners.criterion import Loss, aligned, class_axis, name_of, normaliser, refuse_loss, sums, weighted_loss
from paragrad.models.losses import OwnLoss, logits_of
from paragrad.optim.optimizer import is_model

OWN = "the model's own loss"


@dataclass(frozen=True)
class Judged:
    """Evaluation of one mini-batch."""

    sums: dict[str, tuple[float, float]]
    """Loss, and accuracy where it has a meaning: each as a sum with its divisor."""
    output: Any
    target: Any


class Objective(Protocol):
    """The loss of a module on a mini-batch."""

    @property
    def axis(self) -> int | None:
        """Axis of the outputs along which classes are compared, known after ``judge``; None if there are no classes."""

    def mean(self, module: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        """Return the mean loss and the divisor of the mean."""

    def try_on(self, module: nn.Module, batch: Any) -> Any:
        """Call the module once; return its output, or None if only the loss can call it."""

    def judge(self, module: nn.Module, batch: Any, *, outputs: bool) -> Judged:
        """Return loss and accuracy; with ``outputs`` also output and target, for metrics."""


def objective_of(loss: Loss) -> Objective:
    """Return the objective for a loss. The names of its parameters decide: (model, batch), or any others."""
    refuse_loss(loss)
    if isinstance(loss, OwnLoss):
        return OfItself(loss)
    return OfModel(loss) if takes_model_and_batch(loss) else OfOutput(loss)


def takes_model_and_batch(loss: Any) -> bool:
    """Return whether a loss is a function of (model, batch); raise if its parameters' names are ambiguous."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):
        return False
    parameters = list(signature.parameters.values())[:2]
    model, batch = bool(parameters) and is_model(parameters[0]), len(parameters) == 2 and parameters[1].name == "batch"
    if model != batch:
        names = ", ".join(parameter.name for parameter in parameters)
        raise UsageError(
            f"The loss {name_of(loss)} takes ({names}). Name its parameters (model, batch) if it is to be called with the "
            "model and a mini-batch, or (output, target) if it is to be called with the model's output and the target."
        )
    return model


def own_loss(model: nn.Module, source: Source, *, asked: bool) -> tuple[OwnLoss, str] | None:
    """Return the loss that a model computes itself, and a sentence that says so; None if it returns no loss.

    A copy of the model is called with a mini-batch of two rows and their targets. If the user did not ask for the model's own
    loss, this happens only if ``forward`` has a parameter for the targets of a dict.
    """
    given = source.batch(np.arange(min(2, len(source)), dtype=np.int64))
    batch = given.rows if isinstance(given, Weighted) else given
    if not asked and not _takes_target(model, batch):
        return None
    trial = copy.deepcopy(model).eval()
    with fitting(), torch.enable_grad():
        output = OwnLoss.output(trial, batch)
    if not asked and not OwnLoss.is_in(output):
        return None
    _refuse_weights(given, OWN)
    loss = OwnLoss().fitted(output, split(batch)[1])
    kind = "" if loss.shift is None else ", the cross-entropy of its logits" + " with the next target" * loss.shift
    return loss, f"Loss: own, because the model returns a loss when it is called with the targets{kind}."


def _takes_target(model: nn.Module, batch: Any) -> bool:
    keys = [key for key in TARGETS if key in batch] if isinstance(batch, Mapping) else []
    forward = inspect.signature(getattr(model, "_orig_mod", model).forward)  # a compiled model's own takes anything
    return any(key in forward.parameters for key in keys)


class OfOutput:
    """A loss of (output, target)."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.axis: int | None = None

    def mean(self, module: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        output, target = self._called(module, batch)
        weight = weight_of(batch)
        if weight is None:
            return self._loss(output, target), normaliser(self._loss, target)
        return weighted_loss(self._loss, output, target, weight), float(len(weight))

    def try_on(self, module: nn.Module, batch: Any) -> Any:
        return call(module, split(batch)[0])

    def judge(self, module: nn.Module, batch: Any, *, outputs: bool) -> Judged:
        output, target = self._called(module, batch)
        if self.axis is None:
            self.axis = class_axis(self._loss, output, target)
        return Judged(sums(self._loss, output, target, weight_of(batch), self.axis), output, target)

    def _called(self, module: nn.Module, batch: Any) -> tuple[Any, Any]:
        inputs, target = split(batch)
        output = call(module, inputs)
        return output, aligned(output, target, self._loss)


class OfModel:
    """A loss of (model, batch): a user-defined training step."""

    axis = None

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def mean(self, module: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        _refuse_weights(batch, name_of(self._loss))
        return self._loss(module, batch), _rows(batch)

    def try_on(self, module: nn.Module, batch: Any) -> Any:
        self.mean(module, batch)

    def judge(self, module: nn.Module, batch: Any, *, outputs: bool) -> Judged:
        loss, rows = self.mean(module, batch)
        found = {"loss": (float(loss) * rows, rows)}
        if not outputs:
            return Judged(found, None, None)
        inputs, target = split(batch)
        return Judged(found, logits_of(call(module, inputs)), target)


class OfItself:
    """The loss that a model returns when it is called with the targets, too."""

    axis = -1

    def __init__(self, loss: OwnLoss) -> None:
        self._loss = loss

    def mean(self, module: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        _refuse_weights(batch, OWN)
        return self._loss(module, batch), self._divisor(batch)

    def try_on(self, module: nn.Module, batch: Any) -> Any:
        return logits_of(self._loss.output(module, batch))

    def judge(self, module: nn.Module, batch: Any, *, outputs: bool) -> Judged:
        _refuse_weights(batch, OWN)
        output = self._loss.output(module, batch)
        logits, target = self._loss.pairs(logits_of(output), split(batch)[1])
        divisor = self._divisor(batch)
        found = {"loss": (float(self._loss.value(output)) * divisor if divisor else 0.0, divisor)}
        if self._loss.shift is not None:
            counted = target != self._loss.ignored
            found["accuracy"] = (float((logits.argmax(-1) == target)[counted].sum()), float(counted.sum()))
        return Judged(found, logits, target)

    def _divisor(self, batch: Any) -> float:
        """Return the number of targets not ignored if the loss is known to be their mean, else the number of rows."""
        return _rows(batch) if self._loss.shift is None else self._loss.counted(split(batch)[1])


def _rows(batch: Any) -> float:
    """Return the length of a mini-batch's first tensor."""
    return next((float(len(leaf)) for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim), 1.0)


def _refuse_weights(batch: Any, name: str) -> None:
    if weight_of(batch) is not None:
        raise UsageError(
            f"Rows have weights, but {name} gives one number for all of them. Make the weights part of the batch, and use "
            "them in a loss of (model, batch)."
        )
