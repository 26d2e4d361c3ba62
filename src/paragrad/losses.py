"""Losses by name, the loss that fits a target, and how many outputs a model then needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from paragrad.data.source import Arrays, Source, all_rows, leaves, target_of
from paragrad.errors import UsageError, unknown


class Value(nn.Module):
    """The mean of what the model puts out, for models that are the function to be minimised; the target is not looked at."""

    def forward(self, output: torch.Tensor, target: object) -> torch.Tensor:
        return output.mean()


_TABLE: dict[str, Callable[[], nn.Module]] = {
    "crossentropy": nn.CrossEntropyLoss,
    "bce": nn.BCEWithLogitsLoss,
    "mse": nn.MSELoss,
    "l1": nn.L1Loss,
    "huber": nn.HuberLoss,
    "value": Value,
}

CATALOGUE: dict[str, str] = {
    "crossentropy": "one class of several: targets are class numbers from 0 (torch.nn.CrossEntropyLoss)",
    "bce": "yes or no, once or for each of several labels: targets are 0 or 1 (torch.nn.BCEWithLogitsLoss)",
    "mse": "a number: the mean squared error (torch.nn.MSELoss)",
    "l1": "a number: the mean absolute error (torch.nn.L1Loss)",
    "huber": "a number: squared where the error is below 1, absolute above (torch.nn.HuberLoss)",
    "value": "the output itself, for a toy problem or a model that computes its own loss; targets are not looked at",
}
"""Every loss by name, each in a line."""

LOOKED_AT = 1_000
"""Rows of a Dataset that are looked at to infer its loss."""


def build(name: str) -> nn.Module:
    """The loss of a name."""
    if name.lower() not in _TABLE:
        raise unknown("loss", name, _TABLE)
    return _TABLE[name.lower()]()


def name_of(loss: object) -> str | None:
    """The name of a loss that ``build`` makes an equal one from; None where it has none, or settings of its own."""
    for name, kind in _TABLE.items():
        if type(loss) is kind and _settings(loss) == _settings(kind()):
            return name
    return None


def infer(source: Source) -> tuple[nn.Module, str]:
    """The loss that fits the targets, and a sentence that says which and why."""
    rows = np.arange(min(len(source), LOOKED_AT), dtype=np.int64)
    target = _target(source.tree) if isinstance(source, Arrays) else _target(source.batch(rows))
    shape = f"{target.dtype}".removeprefix("torch.") + f" of shape {tuple(target.shape[1:])}" * (target.ndim > 1)
    binary = target.ndim == 2 and target.shape[1] > 1 and bool(((target == 0) | (target == 1)).all())
    if target.is_complex():
        raise UsageError(f"No loss is known for {target.dtype} targets: give loss=, a function of (output, target).")
    if binary:
        return nn.BCEWithLogitsLoss(), (
            "Loss: bce, because each row has several targets of 0 or 1. (Where just one of them is 1, loss='crossentropy' "
            "may be meant.)"
        )
    if not target.is_floating_point():
        return nn.CrossEntropyLoss(), f"Loss: crossentropy, because the targets are whole numbers ({shape}): classes."
    return nn.MSELoss(), f"Loss: mse, because the targets are {shape}."


def outputs(source: Source, loss: nn.Module) -> int:
    """How many outputs a built-in model needs: one for each class, or for each number in a target."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        most = -1
        for target in _targets(source):
            if target.is_floating_point():
                return int(target.shape[1])
            most = max(most, int(target.max()))
        # Two at least: among one class there is nothing to tell apart.
        return max(most + 1, 2)
    target = next(_targets(source))
    return math.prod(target.shape[1:])


def _settings(loss: object) -> dict[str, object]:
    """What a loss was made with; tensors, such as weights of classes, are told apart by themselves."""
    held = {name: id(tensor) for name, tensor in loss.named_buffers()} if isinstance(loss, nn.Module) else {}
    return held | {name: value for name, value in vars(loss).items() if not name.startswith("_") and name != "training"}


def _target(tree: object) -> torch.Tensor:
    target = leaves(target_of(tree))[-1]
    if not isinstance(target, torch.Tensor):
        raise UsageError(f"The targets are {type(target).__name__}, not tensors: give loss=, a function of (output, target).")
    return target


def _targets(source: Source) -> Iterator[torch.Tensor]:
    if isinstance(source, Arrays):
        yield _target(source.tree)
        return
    for rows in all_rows(source, LOOKED_AT):
        yield _target(source.batch(rows))
