"""Mini-batches: split into inputs, target and row weights; and a call of a module on the inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from paragrad.data.source import TARGETS, Weighted, target_key
from paragrad.errors import UsageError


def split(batch: Any) -> tuple[Any, Any]:
    """Return (inputs, target). The target is the last item of a tuple, or the target key of a dict.

    A single tensor is its own target.
    """
    if isinstance(batch, Weighted):
        return split(batch.rows)
    if isinstance(batch, Mapping):
        key = target_key(batch)
        return {k: v for k, v in batch.items() if k != key}, batch[key]
    if isinstance(batch, tuple | list):
        if len(batch) == 1:
            return batch[0], batch[0]
        return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
    return batch, batch


def has_target(batch: Any) -> bool:
    """Return whether ``split`` finds a target: a dict may have no target key."""
    if isinstance(batch, Weighted):
        return has_target(batch.rows)
    return not isinstance(batch, Mapping) or any(key in batch for key in TARGETS)


def weight_of(batch: Any) -> torch.Tensor | None:
    """Return the weight of each row; None if rows have no weights."""
    return batch.weight if isinstance(batch, Weighted) else None


def call(module: nn.Module, inputs: Any) -> Any:
    """Call a module on one input, a tuple of inputs, or a dict of named inputs."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)


@contextlib.contextmanager
def fitting() -> Iterator[None]:
    """Raise a UsageError if the model, called for the first time on the user's rows, does not accept them."""
    try:
        yield
    except UsageError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"The model does not take these rows: {type(error).__name__}: {error}") from error
