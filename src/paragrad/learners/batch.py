"""A mini-batch: its inputs, its target and the weights of its rows; and a module called on the inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from paragrad.data.source import TARGETS, Weighted, target_key
from paragrad.errors import UsageError


def split(batch: Any) -> tuple[Any, Any]:
    """(inputs, target): the last of a tuple, the target key of a dict; a lone tensor is its own target."""
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
    """Whether ``split`` finds a target: a dict may have none that is named so."""
    if isinstance(batch, Weighted):
        return has_target(batch.rows)
    return not isinstance(batch, Mapping) or any(key in batch for key in TARGETS)


def weight_of(batch: Any) -> torch.Tensor | None:
    """The weight of each row, where rows have weights."""
    return batch.weight if isinstance(batch, Weighted) else None


def call(module: nn.Module, inputs: Any) -> Any:
    """A module on one input, several, or named ones."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, tuple | list):
        return module(*inputs)
    return module(inputs)


@contextlib.contextmanager
def fitting() -> Iterator[None]:
    """A model is called with a user's rows for the first time: say that they do not fit it."""
    try:
        yield
    except UsageError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"The model does not take these rows: {type(error).__name__}: {error}") from error
