"""Seed, save and restore the global random number generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed the generators that models and datasets draw from."""
    seed_cpu(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def seed_cpu(seed: int) -> None:
    """Seed the generators of the CPU."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def states() -> tuple[Any, ...]:
    """Return the states of the generators of the CPU."""
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def restore(states: tuple[Any, ...]) -> None:
    """Set the generators to the states that ``states`` returned."""
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restore the generators on exit to their states on entry."""
    before = states()
    try:
        yield
    finally:
        restore(before)
