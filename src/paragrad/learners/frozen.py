"""Parameters that require no gradient: those that training changes anyway are carried, the others are watched."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from paragrad.errors import UsageError

SAMPLE = 256
"""Number of elements that are compared per tensor; code that updates a copy of a network changes nearly all of them."""


def frozen(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the floating-point parameters that require no gradient, by name."""
    named = module.named_parameters()
    return {name: parameter for name, parameter in named if not parameter.requires_grad and parameter.is_floating_point()}


class _Original:
    """A tensor's identity, memory, version and some of its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._address = tensor.data_ptr()
        self._version = tensor._version
        self._sample = _sample(tensor).clone()

    def is_written(self, now: torch.Tensor) -> bool:
        """Return whether torch counted a write, or the tensor or its memory is another one."""
        return now is not self._tensor or now.data_ptr() != self._address or now._version != self._version

    def differs(self, now: torch.Tensor) -> bool:
        return not torch.equal(_sample(now), self._sample)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLE)]


class Watch:
    """Tensors that must stay unchanged."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self._originals = {name: _Original(tensor) for name, tensor in named.items()}
        self._checks = 0

    def changed(self, module: nn.Module, *, by_value: bool = True) -> list[str]:
        """Return the names of the tensors that were written to or replaced."""
        changed = []
        for name, original in self._originals.items():
            path, _, leaf = name.rpartition(".")
            now = module.get_submodule(path)._parameters.get(leaf)
            if now is None or original.is_written(now) or (by_value and original.differs(now)):
                changed.append(name)
        return changed

    def check(self, module: nn.Module) -> None:
        """Raise if a tensor has changed; compare values ever more rarely, since torch counts most writes."""
        self._checks += 1
        is_power_of_two = not self._checks & (self._checks - 1)
        changed = self.changed(module, by_value=is_power_of_two)
        if changed:
            raise UsageError(
                f"Parameter {changed[0]!r} requires no gradient, but training changes it, after the first step only. A trial "
                "step before the run finds such parameters. It did not find this one, so its changes would be lost. Change it "
                "in the first training step, too, or register it as a buffer."
            )
