"""Losses by name, the loss that fits a target, and the number of outputs that a model then needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from paragrad.data.source import Arrays, Source, all_rows, leaves, target_of
from paragrad.errors import UsageError, unknown
from paragrad.models import ownfile


class Value(nn.Module):
    """The mean output, for a model that is itself the function to minimise; the target is ignored."""

    def forward(self, output: torch.Tensor, target: object) -> torch.Tensor:
        return output.mean()


class OwnLoss(nn.Module):
    """The loss that a model returns if it is called with the targets, too, as Hugging Face models with ``labels``."""

    ignored = -100
    """Target that such models ignore."""

    def __init__(self, shift: int | None = None) -> None:
        super().__init__()
        self._shift = shift  # private, so that ``name_of`` ignores it

    @property
    def shift(self) -> int | None:
        """Positions between logits and their targets if the loss is their cross-entropy; None: the loss may be any other."""
        return self._shift

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the loss of a mini-batch."""
        return self.value(self.output(model, batch))

    @staticmethod
    def output(model: Any, batch: Any) -> Any:
        """Call the model on a whole mini-batch."""
        return model(**batch) if isinstance(batch, Mapping) else model(*batch)

    @staticmethod
    def value(output: Any) -> torch.Tensor:
        """Return the loss in a model's output."""
        loss = _part(output, "loss")
        if not isinstance(loss, torch.Tensor):
            raise UsageError(
                f"loss='own', but the model returned a {type(output).__name__} without a loss: give loss=, a function of "
                "(output, target) or of (model, batch)."
            )
        return loss

    def pairs(self, logits: Any, target: Any) -> tuple[Any, Any]:
        """Return logits and targets so that each logit is at the position of its target."""
        return (logits[:, : -self._shift], target[:, self._shift :]) if self._shift else (logits, target)

    def counted(self, target: torch.Tensor) -> float:
        """Return the number of targets that are not ignored."""
        return float((target[:, self._shift :] if self._shift else target).ne(self.ignored).sum())

    @staticmethod
    def is_in(output: Any) -> bool:
        """Return whether a model's output has a loss to train on."""
        loss = _part(output, "loss")
        return isinstance(loss, torch.Tensor) and not loss.ndim and loss.requires_grad

    def fitted(self, output: Any, target: Any) -> OwnLoss:
        """Return the same loss with its ``shift``, found from a model's output for one mini-batch."""
        logits, loss = logits_of(output), self.value(output)
        if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor) or target.is_floating_point():
            return OwnLoss()
        fitting = [shift for shift in (0, 1) if _is_cross_entropy(loss, logits, target, shift)]
        return OwnLoss(fitting[0]) if len(fitting) == 1 else OwnLoss()


def logits_of(output: Any) -> Any:
    """Return the logits in a model's output; the output itself if it has no logits."""
    logits = _part(output, "logits")
    return output if logits is None else logits


def _part(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _is_cross_entropy(loss: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, shift: int) -> bool:
    """Return whether a loss is the mean cross-entropy of logits with the targets ``shift`` positions later."""
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
    "value": "the output itself, for a toy problem or a model that computes its own loss; targets are ignored",
    "FILE.py:FUNCTION": "your own: a function of (output, target) or of (model, batch) that returns one number",
    "own": "the loss that the model returns when it is called with the targets, too (Hugging Face: labels, .loss)",
}
"""Every loss by name, with a one-line description."""

INSPECTED = 1_000
"""Rows of a Dataset that are read at a time; ``infer`` chooses a loss from the first ones."""


def build(name: str) -> Callable[..., Any]:
    """Return the loss of a name or of FILE.py:FUNCTION, which may also name a class.

    It is a function of (output, target) or of (model, batch).
    """
    if ownfile.is_named(name):
        found: Any = ownfile.load(name, "loss")
        found = found() if isinstance(found, type) else found
        found.paragrad_spec = ownfile.absolute(name)
        return found  # type: ignore[no-any-return]
    if name.lower() not in _TABLE:
        raise unknown("loss", name, [*_TABLE, "FILE.py:FUNCTION"])
    return _TABLE[name.lower()]()


def by_class(loss: Any) -> bool:
    """Return whether integer targets are class numbers to this loss."""
    functions = (nn.functional.cross_entropy, nn.functional.nll_loss)
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or any(loss is function for function in functions)


def as_classes(loss: object) -> bool | None:
    """Return whether a loss takes targets as class numbers; None if no loss is given and the targets decide."""
    if loss is None:
        return None
    return loss.lower() == "crossentropy" if isinstance(loss, str) else by_class(loss)


def name_of(loss: object) -> str | None:
    """Return the name from which ``build`` makes an equal loss; None if there is none, or if it has other settings."""
    for name, kind in _TABLE.items():
        if type(loss) is kind and _settings(loss) == _settings(kind()):
            return name
    return getattr(loss, "paragrad_spec", None)


def is_own(loss: object) -> bool:
    """Return whether a loss is user-defined."""
    return name_of(loss) is None or hasattr(loss, "paragrad_spec")


def infer(source: Source) -> tuple[nn.Module, str]:
    """Return the loss that fits the targets, and a sentence with the choice and its reason."""
    target = next(_targets(source))
    shape = f"{target.dtype}".removeprefix("torch.") + f" of shape {tuple(target.shape[1:])}" * (target.ndim > 1)
    if target.is_complex():
        raise UsageError(f"No loss is known for {target.dtype} targets: give loss=, a function of (output, target).")
    if target.ndim == 2 and target.shape[1] > 1 and _is_binary(target):
        return nn.BCEWithLogitsLoss(), (
            "Loss: bce, because each row has several targets of 0 or 1. (If exactly one of them is 1, you may want "
            "loss='crossentropy'.)"
        )
    if not target.is_floating_point():
        return nn.CrossEntropyLoss(), f"Loss: crossentropy, because the targets are whole numbers ({shape}): classes."
    hint = " (They are all 0 or 1: for yes or no, give loss='bce'; for classes, whole numbers.)" if _is_binary(target) else ""
    return nn.MSELoss(), f"Loss: mse, because the targets are {shape}.{hint}"


def _is_binary(target: torch.Tensor) -> bool:
    return bool(((target == 0) | (target == 1)).all())


def outputs(source: Source, loss: object) -> int:
    """Return the number of outputs that a built-in model needs: one per class, or one per number in a target."""
    first = next(_targets(source))
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) or (is_own(loss) and not first.is_floating_point()):
        most = -1
        for target in _targets(source):
            if target.is_floating_point():
                return int(target.shape[1])
            most = max(most, int(target.max()))
        # At least two: a single class leaves nothing to tell apart.
        return max(most + 1, 2)
    return math.prod(first.shape[1:])


def _settings(loss: object) -> dict[str, object]:
    """Return the arguments that a loss was made with; tensors, such as class weights, are compared by identity."""
    tensors = {name: id(tensor) for name, tensor in loss.named_buffers()} if isinstance(loss, nn.Module) else {}
    return tensors | {name: value for name, value in vars(loss).items() if not name.startswith("_") and name != "training"}


def _target(tree: object) -> torch.Tensor:
    target = leaves(target_of(tree))[-1]
    if not isinstance(target, torch.Tensor):
        raise UsageError(f"The targets are {type(target).__name__}, not tensors: give loss=, a function of (output, target).")
    return target


def _targets(source: Source) -> Iterator[torch.Tensor]:
    if isinstance(source, Arrays):
        yield _target(source.tree)
        return
    for rows in all_rows(source, INSPECTED):
        yield _target(source.batch(rows))
