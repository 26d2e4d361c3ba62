"""A loss of (output, target): target shapes, the normaliser of its mean, row weights and accuracy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from paragrad.data.source import leaves
from paragrad.errors import UsageError
from paragrad.models.losses import by_class as by_class

Loss: TypeAlias = Callable[[Any, Any], torch.Tensor]

TRIALS = 8
"""Random targets on which ``class_axis`` tries a loss."""


def refuse_loss(loss: Any) -> None:
    """Raise if the means of mini-batches cannot be joined to the loss of all of them, or if the loss has parameters."""
    if getattr(loss, "reduction", "mean") in ("sum", "none"):
        raise UsageError(
            f"{type(loss).__name__} has reduction={loss.reduction!r}, but workers' losses are joined as means: "
            "use reduction='mean'."
        )
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise UsageError(f"{type(loss).__name__} has parameters, which would never be trained: make them part of the model.")


def weighted_loss(loss: Any, output: Any, target: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return ``sum of w_i * loss_i / rows``; the sum of weights cannot divide, since negative weights may make it 0."""
    each = _without_reduction(loss)(output, target)
    if not isinstance(each, torch.Tensor) or each.shape[:1] != weight.shape:
        raise UsageError(
            f"Rows have weights, but with reduction='none' {name_of(loss)} returned "
            f"{getattr(each, 'shape', type(each).__name__)} for {len(weight)} rows: use a loss that returns one number per row."
        )
    flat = each.reshape(len(weight), -1)
    rows = flat.sum(1) if getattr(loss, "reduction", "mean") == "batchmean" else flat.mean(1)
    return (weight * rows).sum() / len(weight)


def _without_reduction(loss: Any) -> Loss:
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        each = copy.copy(loss)
        each.reduction = "none"  # type: ignore[assignment]
        return each
    if any(loss is function for function in vars(nn.functional).values()):
        return lambda output, target: loss(output, target, reduction="none")
    raise UsageError(
        f"Rows have weights, but {name_of(loss)} gives one number for all of them. Use a loss of torch.nn, such as "
        "torch.nn.CrossEntropyLoss(), or your own module with an attribute reduction ('mean' or 'none') that it follows."
    )


def name_of(loss: Any) -> str:
    """Return the name of a loss function, or of a loss module's class."""
    return str(getattr(loss, "__name__", type(loss).__name__))


def aligned(output: Any, target: Any, loss: Any = None) -> Any:
    """Return the target in the output's shape: torch would broadcast (B, 1) against labels of (B,) to (B, B)."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return target
    if output.shape != target.shape:
        classes = by_class(loss) and not target.is_floating_point()
        if classes or output.shape[:1] != target.shape[:1] or output.numel() != target.numel():
            return target
        target = target.reshape(output.shape)
    return target if target.is_floating_point() else target.to(output.dtype)


def _ignored(loss: Any) -> int:
    """Return the class number that the loss ignores; torch's default if the loss sets none."""
    return int(getattr(loss, "ignore_index", -100))


def normaliser(loss: Any, target: Any) -> float:
    """Return the divisor of the mean loss: rows, the sum of these rows' class weights, or the targets not ignored."""
    first = leaves(target)[0]
    if not isinstance(first, torch.Tensor) or not first.ndim:
        return 1.0
    if by_class(loss) and not first.is_floating_point():
        counted = first[first != _ignored(loss)]
        weight = getattr(loss, "weight", None)
        return float(counted.numel() if weight is None else weight[counted].sum())
    return float(first.shape[0])


def sums(
    loss: Any, output: Any, target: Any, weight: torch.Tensor | None, axis: int | None = None
) -> dict[str, tuple[float, float]]:
    """Return loss and accuracy of some rows as sums, each with its divisor; no accuracy where it has no meaning.

    ``axis`` is the axis of the classes; None: ``class_axis`` finds it.
    """
    if weight is None:
        divisor = normaliser(loss, target)
        found = {"loss": (float(loss(output, target)) * divisor, divisor)}
    else:
        found = {"loss": (float(weighted_loss(loss, output, target, weight)) * len(weight), float(len(weight)))}
    right = _right(loss, output, target, axis)
    if right is None:
        return found
    if right.shape == target.shape and not target.is_floating_point():
        counted = target != _ignored(loss)
    else:
        counted = torch.ones_like(right, dtype=torch.bool)
    parts = [right & counted, counted]
    if weight is not None:
        parts = [part.to(weight.dtype).reshape(len(weight), -1).mean(1) * weight for part in parts]
    found["accuracy"] = (float(parts[0].sum()), float(parts[1].sum()))
    return found


class Means:
    """Mean loss and accuracy over many mini-batches."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, found: dict[str, tuple[float, float]]) -> None:
        """Add the sums of a mini-batch, each with its divisor."""
        for name, (value, divisor) in found.items():
            total = self._sums.setdefault(name, [0.0, 0.0])
            total[0] += value
            total[1] += divisor

    def result(self) -> dict[str, float]:
        """Return the means by name."""
        return {name: total / divisor if divisor else math.nan for name, (total, divisor) in self._sums.items()}


def _right(loss: Any, output: Any, target: Any, axis: int | None) -> torch.Tensor | None:
    """Return which answers are right; None where that has no meaning."""
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
    """Return the axis of the output along which the loss compares classes; None if targets are not class numbers.

    It is the axis that the target lacks. If several axes fit (outputs of (B, T, V) with T = V), torch's own losses use axis
    1. Any other loss is tried: raising the output of the true class lowers it most.
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
    # Scaled down, because the gradient of a certain answer would be 0.
    trial = (output.detach().clone() / output.detach().abs().max().clamp(min=1.0)).requires_grad_()
    draws, hits = torch.Generator().manual_seed(0), dict.fromkeys(fits, 0.0)
    for _ in range(TRIALS):
        drawn = torch.randint(0, output.shape[fits[0]], target.shape, generator=draws).to(target)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(loss(trial, drawn), trial)
        for axis in fits:
            right = (gradient.argmin(axis) == drawn)[(gradient != 0).any(axis)]
            hits[axis] += float(right.float().mean()) if right.numel() else 0.0
    # Ties go to the last axis, where sequence models have their classes.
    return max(fits, key=lambda axis: (hits[axis], axis))
