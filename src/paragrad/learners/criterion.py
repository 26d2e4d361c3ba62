"""A loss of (output, target): the shape of the target, the normaliser of its mean, weights of rows, right answers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from paragrad.data.source import leaves
from paragrad.errors import UsageError

Loss: TypeAlias = Callable[[Any, Any], torch.Tensor]

TRIALS = 8
"""Draws of targets that a loss is tried on."""
BY_CLASS = (nn.functional.cross_entropy, nn.functional.nll_loss)


def refuse_loss(loss: Any) -> None:
    """Raise for a loss whose values of mini-batches cannot be joined as means."""
    if getattr(loss, "reduction", "mean") in ("sum", "none"):
        raise UsageError(
            f"{type(loss).__name__} has reduction={loss.reduction!r}, but workers' losses are joined as means: "
            "use reduction='mean'."
        )
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise UsageError(
            f"{type(loss).__name__} has parameters of its own, which would never be trained: make them part of the model."
        )


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
    return target[target != _ignored(loss)] if not target.is_floating_point() else target


def _ignored(loss: Any) -> int:
    """The number in place of a class that does not count: torch's own, where the loss does not say."""
    return int(getattr(loss, "ignore_index", -100))


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


def sums(
    loss: Any, output: Any, target: Any, weight: torch.Tensor | None, axis: int | None = None
) -> dict[str, tuple[float, float]]:
    """Loss and accuracy of some rows as sums, each with what it is to be divided by; no accuracy where it has no meaning.

    ``axis`` is the one of the classes, see ``class_axis``; None: it is looked for.
    """
    if weight is None:
        divisor = normaliser(loss, target)
        found = {"loss": (float(loss(output, target)) * divisor, divisor)}
    else:
        found = {"loss": (float(weighted_loss(loss, output, target, weight)) * len(weight), float(len(weight)))}
    right = _right(loss, output, target, axis)
    if right is None:
        return found
    here = _counts(loss, right, target)
    if weight is None:
        found["accuracy"] = (float((right & here).sum()), float(here.sum()))
    else:
        mine, all_of_it = (
            (each.to(weight.dtype).reshape(len(weight), -1).mean(1) * weight).sum() for each in (right & here, here)
        )
        found["accuracy"] = (float(mine), float(all_of_it))
    return found


class Means:
    """Loss and accuracy of many rows: sums over mini-batches, each with what it is divided by."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, found: dict[str, tuple[float, float]]) -> None:
        """The sums of a mini-batch."""
        for name, (value, divisor) in found.items():
            total = self._sums.setdefault(name, [0.0, 0.0])
            total[0] += value
            total[1] += divisor

    def result(self) -> dict[str, float]:
        """The means by name."""
        return {name: total / divisor if divisor else math.nan for name, (total, divisor) in self._sums.items()}


def _counts(loss: Any, right: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Which answers count: those whose target the loss does not ignore."""
    if right.shape == target.shape and not target.is_floating_point():
        return target != _ignored(loss)
    return torch.ones_like(right, dtype=torch.bool)


def _right(loss: Any, output: Any, target: Any, axis: int | None) -> torch.Tensor | None:
    """Which answers are right, or None where that has no meaning."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    axis = class_axis(loss, output, target) if axis is None else axis
    if axis is not None and output.ndim == target.ndim + 1:
        return output.argmax(axis) == target
    if by_class(loss) and output.shape == target.shape and output.ndim > 1:
        return output.argmax(1) == target.argmax(1)
    if isinstance(loss, nn.BCEWithLogitsLoss) or loss is nn.functional.binary_cross_entropy_with_logits:
        return (output > 0) == (target > 0.5)
    if isinstance(loss, nn.BCELoss) or loss is nn.functional.binary_cross_entropy:
        return (output > 0.5) == (target > 0.5)
    return None


def class_axis(loss: Any, output: Any, target: Any) -> int | None:
    """The axis of the output along which the loss compares classes; None where targets are no numbers of classes.

    It is the one that the target lacks. Where several have its length (outputs of (B, T, V) with T = V), torch's own losses
    mean axis 1; another loss is tried: raising the output of the true class lowers it most.
    """
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return None
    if target.is_floating_point() or target.is_complex() or output.ndim != target.ndim + 1:
        return None
    fits = [axis for axis in range(1, output.ndim) if output.shape[:axis] + output.shape[axis + 1 :] == target.shape]
    if by_class(loss):
        return 1 if 1 in fits else None
    return _tried_axis(loss, output, target, fits) if len(fits) > 1 else fits[0] if fits else None


def _tried_axis(loss: Loss, output: torch.Tensor, target: torch.Tensor, fits: list[int]) -> int:
    # Made smaller: the gradient of an answer that is certain would be 0.
    trial = (output.detach().clone() / output.detach().abs().max().clamp(min=1.0)).requires_grad_()
    draws, hits = torch.Generator().manual_seed(0), dict.fromkeys(fits, 0.0)
    for _ in range(TRIALS):
        drawn = torch.randint(0, output.shape[fits[0]], target.shape, generator=draws).to(target)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(loss(trial, drawn), trial)
        for axis in fits:
            right = (gradient.argmin(axis) == drawn)[(gradient != 0).any(axis)]
            hits[axis] += float(right.float().mean()) if right.numel() else 0.0
    return max(
        fits, key=lambda axis: (hits[axis], axis)
    )  # of equal ones the last, where models of sequences have their classes


def by_class(loss: Any) -> bool:
    """Whether integer targets are numbers of classes to this loss."""
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or any(loss is function for function in BY_CLASS)
