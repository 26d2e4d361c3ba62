"""An optimiser's state in two forms: for one flat vector, and for the tensors in it. A checkpoint may hold either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from paragrad.errors import UsageError

State: TypeAlias = Mapping[str, torch.Tensor]
"""State tensors by ``index.key``: the index of the parameter, and the optimiser's name for the state tensor."""


def shaped(state: State, shapes: Sequence[torch.Size]) -> State:
    """Return the state of a flat vector as that of tensors of these shapes; such a state is returned as it is."""
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
    """Return a state as that of one flat vector: the inverse of ``shaped``.

    ``names`` are the optimiser's names (True: one number per element; False: one for all).
    """
    if not state:
        return {}
    missing = sorted(_key(name) for name in names if name not in state)
    if missing:
        raise UsageError(
            f"The optimiser's state lacks {', '.join(missing)}: it was saved with another optimiser, or with other settings. "
            "Continue with those that it was saved with."
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
