"""An optimiser's state in two forms: of one flat vector, and of the tensors that lie in it. A checkpoint may hold either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from paragrad.errors import UsageError

State: TypeAlias = Mapping[str, torch.Tensor]
"""By ``index.key``: which tensor's, and which of the optimiser's names for it."""


def shaped(state: State, shapes: Sequence[torch.Size]) -> State:
    """The state of a flat vector as that of tensors of these shapes; as it is where it is that already."""
    if not _is_flat(state, shapes):
        return state
    found: dict[str, torch.Tensor] = {}
    total, lo = sum(shape.numel() for shape in shapes), 0
    for index, shape in enumerate(shapes):
        for name, tensor in state.items():
            whole = tensor.ndim and tensor.numel() == total
            found[f"{index}.{_key(name)}"] = tensor[lo : lo + shape.numel()].view(shape) if whole else tensor
        lo += shape.numel()
    return found


def flattened(state: State, shapes: Sequence[torch.Size], names: Mapping[str, bool]) -> dict[str, torch.Tensor]:
    """The inverse, of the ``names`` that the optimiser has for it (True: a number for each element; False: one for all)."""
    if not state:
        return {}
    missing = sorted(_key(name) for name in names if name not in state)
    if missing:
        raise UsageError(
            f"The optimiser's state lacks {', '.join(missing)}: it was saved with another optimiser, or with other settings. "
            "Go on with those that it was saved with."
        )
    if _is_flat(state, shapes):
        return {name: state[name] for name in names}
    count = len(shapes)
    return {
        name: torch.cat([state[f"{index}.{_key(name)}"].reshape(-1) for index in range(count)]) if each else state[name]
        for name, each in names.items()
    }


def _is_flat(state: State, shapes: Sequence[torch.Size]) -> bool:
    if len(shapes) == 1:
        return all(tensor.ndim < 2 for tensor in state.values())
    return {name.partition(".")[0] for name in state} == {"0"}


def _key(name: str) -> str:
    return name.partition(".")[2]
