"""Parameters that require no gradient: those that training changes all the same are carried, and the others are watched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from paragrad.errors import UsageError

SAMPLE = 256
"""Elements of a tensor that are compared: what moves a copy of a network moves nearly all of them."""


def frozen(module: nn.Module) -> dict[str, nn.Parameter]:
    """The floating parameters that require no gradient, by name."""
    named = module.named_parameters()
    return {name: parameter for name, parameter in named if not parameter.requires_grad and parameter.is_floating_point()}


@dataclass(frozen=True)
class _Seen:
    """A tensor as it was."""

    tensor: torch.Tensor
    place: int
    version: int
    sample: torch.Tensor


class Watch:
    """Tensors that are to stay as they are."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self._seen = {name: _seen(tensor) for name, tensor in named.items()}
        self._looks = 0

    def changed(self, module: nn.Module) -> list[str]:
        """The names of those that were written to, or replaced."""
        return [name for name, now in _now(module, self._seen) if now is None or _differs(self._seen[name], now)]

    def check(self, module: nn.Module) -> None:
        """Raise where one has changed; values are compared ever more seldom, since few writes are not counted by torch."""
        self._looks += 1
        if self._looks & (self._looks - 1):
            changed = [name for name, now in _now(module, self._seen) if now is None or _written(self._seen[name], now)]
        else:
            changed = self.changed(module)
        if changed:
            raise UsageError(
                f"Parameter {changed[0]!r} requires no gradient, but training changes it, after the first step only. Such "
                "parameters are found by a trial step before the run; this one was not, so that its changes would be lost. "
                "Change it in the first training step, too, or register it as a buffer."
            )


def _now(module: nn.Module, names: Iterable[str]) -> Iterable[tuple[str, torch.Tensor | None]]:
    for name in names:
        path, _, leaf = name.rpartition(".")
        yield name, module.get_submodule(path)._parameters.get(leaf)


def _seen(tensor: torch.Tensor) -> _Seen:
    return _Seen(tensor, tensor.data_ptr(), tensor._version, _sample(tensor).clone())


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLE)]


def _written(seen: _Seen, now: torch.Tensor) -> bool:
    """Whether torch counted a write, or the memory is another."""
    return now is not seen.tensor or now.data_ptr() != seen.place or now._version != seen.version


def _differs(seen: _Seen, now: torch.Tensor) -> bool:
    return _written(seen, now) or not torch.equal(_sample(now), seen.sample)
