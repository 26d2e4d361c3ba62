"""Losses by name, the loss that fits a target, and how many outputs a model then needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from paragrad.data.source import Arrays, Source, all_rows, leaves, target_of
from paragrad.errors import UsageError, unknown
from paragrad.models import ownfile


class Value(nn.Module):
    """The mean of what the model puts out, for models that are the function to be minimised; the target is not looked at."""

    def forward(self, output: torch.Tensor, target: object) -> torch.Tensor:
        return output.mean()


class OwnLoss(nn.Module):
    """The loss that a model returns when it is called with the targets, too, as Hugging Face's models do with ``labels``."""

    ignored = -100
    """The target that such models do not count."""

    def __init__(self, shift: int | None = None) -> None:
        super().__init__()
        self._shift = shift

    @property
    def shift(self) -> int | None:
        """By how many places logits precede their targets, where the loss is their cross-entropy; None: not known to be."""
        return self._shift

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        """The loss of a mini-batch."""
        return self.value(self.output(model, batch))

    @staticmethod
    def output(model: Any, batch: Any) -> Any:
        """What the model returns for a whole mini-batch."""
        return model(**batch) if isinstance(batch, Mapping) else model(*batch)

    @staticmethod
    def value(output: Any) -> torch.Tensor:
        """The loss in what a model returned."""
        loss = _part(output, "loss")
        if not isinstance(loss, torch.Tensor):
            raise UsageError(
                f"loss='own', but the model returned a {type(output).__name__} without a loss: give loss=, a function of "
                "(output, target) or of (model, batch)."
            )
        return loss

    def pairs(self, logits: Any, target: Any) -> tuple[Any, Any]:
        """Logits, each beside its target."""
        return (logits[:, : -self._shift], target[:, self._shift :]) if self._shift else (logits, target)

    def counted(self, target: torch.Tensor) -> float:
        """How many targets are not ignored."""
        return float((target[:, self._shift :] if self._shift else target).ne(self.ignored).sum())

    @staticmethod
    def is_in(output: Any) -> bool:
        """Whether a model returned a loss that can be trained on."""
        loss = _part(output, "loss")
        return isinstance(loss, torch.Tensor) and not loss.ndim and loss.requires_grad

    def fitted(self, output: Any, target: Any) -> OwnLoss:
        """The same with its ``shift``, as what the model returned for one mini-batch shows it."""
        logits, loss = logits_of(output), self.value(output)
        if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor) or target.is_floating_point():
            return OwnLoss()
        fitting = [shift for shift in (0, 1) if _is_cross_entropy(loss, logits, target, shift)]
        return OwnLoss(fitting[0]) if len(fitting) == 1 else OwnLoss()


def logits_of(output: Any) -> Any:
    """The logits in what a model returned; what it returned, where it has none."""
    logits = _part(output, "logits")
    return output if logits is None else logits


def _part(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _is_cross_entropy(loss: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, shift: int) -> bool:
    """Whether a loss is the mean cross-entropy of logits with targets that are so many places further on."""
    if logits.shape[:-1] != target.shape or not target.ndim or (shift and (target.ndim < 2 or target.shape[1] < 2)):
        return False
    mine, wanted = OwnLoss(shift).pairs(logits, target)
    expected = nn.functional.cross_entropy(mine.flatten(0, -2).double(), wanted.flatten())
    return bool(torch.isclose(loss.double(), expected, rtol=1e-5))


_TABLE: dict[str, Callable[[], nn.Module]] = {
    "crossentropy": nn.CrossEntropyLoss,
    "bce": nn.BCEWithLogitsLoss,
    "mse": nn.MSELoss,
    "l1": nn.L1Loss,
    "huber": nn.HuberLoss,
    "value": Value,
    "own": OwnLoss,
}

CATALOGUE: dict[str, str] = {
    "crossentropy": "one class of several: targets are class numbers from 0 (torch.nn.CrossEntropyLoss)",
    "bce": "yes or no, once or for each of several labels: targets are 0 or 1 (torch.nn.BCEWithLogitsLoss)",
    "mse": "a number: the mean squared error (torch.nn.MSELoss)",
    "l1": "a number: the mean absolute error (torch.nn.L1Loss)",
    "huber": "a number: squared where the error is below 1, absolute above (torch.nn.HuberLoss)",
    "value": "the output itself, for a toy problem or a model that computes its own loss; targets are not looked at",
    "FILE.py:FUNCTION": "your own: a function of (output, target) or of (model, batch) that returns one number",
    "own": "the loss that the model returns when it is called with the targets, too (Hugging Face: labels, .loss)",
}
"""Every loss by name, each in a line."""

LOOKED_AT = 1_000
"""Rows of a Dataset that are looked at to infer its loss."""


def build(name: str) -> Callable[..., Any]:
    """The loss of a name, or FILE.py:FUNCTION: one of (output, target) or of (model, batch), or a class of such."""
    if ownfile.is_named(name):
        found: Any = ownfile.load(name, "loss")
        found = found() if isinstance(found, type) else found
        found.paragrad_spec = ownfile.absolute(name)
        return found  # type: ignore[no-any-return]
    if name.lower() not in _TABLE:
        raise unknown("loss", name, [*_TABLE, "FILE.py:FUNCTION"])
    return _TABLE[name.lower()]()


def as_classes(loss: object) -> bool | None:
    """Whether a loss takes targets for numbers of classes; None: no loss is given, and the targets decide."""
    if loss is None:
        return None
    if isinstance(loss, str):
        return loss.lower() == "crossentropy"
    functions = (nn.functional.cross_entropy, nn.functional.nll_loss)
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or any(loss is function for function in functions)


def name_of(loss: object) -> str | None:
    """The name of a loss that ``build`` makes an equal one from; None where it has none, or settings of its own."""
    for name, kind in _TABLE.items():
        if type(loss) is kind and _settings(loss) == _settings(kind()):
            return name
    return getattr(loss, "paragrad_spec", None)


def is_own(loss: object) -> bool:
    """Whether a loss is one of the user's own."""
    return name_of(loss) is None or hasattr(loss, "paragrad_spec")


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
    binary = bool(((target == 0) | (target == 1)).all())
    meant = " (They are all 0 or 1: for yes or no, give loss='bce'; for classes, whole numbers.)" if binary else ""
    return nn.MSELoss(), f"Loss: mse, because the targets are {shape}.{meant}"


def outputs(source: Source, loss: object) -> int:
    """How many outputs a built-in model needs: one for each class, or for each number in a target."""
    first = next(_targets(source))
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or (is_own(loss) and not first.is_floating_point()):
        most = -1
        for target in _targets(source):
            if target.is_floating_point():
                return int(target.shape[1])
            most = max(most, int(target.max()))
        # Two at least: among one class there is nothing to tell apart.
        return max(most + 1, 2)
    return math.prod(first.shape[1:])


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
