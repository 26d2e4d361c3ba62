"""The global generators of random numbers: seeded, read, and put back as they were."""

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
    """The states of the generators on the CPU."""
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def restore(states: tuple[Any, ...]) -> None:
    """The inverse of ``states``."""
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Leave the generators as they were, whatever is drawn inside."""
    before = states()
    try:
        yield
    finally:
        restore(before)
