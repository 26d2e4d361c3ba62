"""The Learner protocol: one model as local steps on one flat vector. Write your own for a GAN or a custom training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch

from paragrad.data.source import Source
from paragrad.types import Vector, VectorOptimizer


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one mini-batch: its mean loss, and the normaliser of that mean (rows, or the sum of class weights)."""

    loss: float
    weight: float


@runtime_checkable
class Learner(Protocol):
    """One model as local steps on one flat vector; ``pg.train`` takes a function that makes one.

    Optional abilities are separate protocols, below; ``types.Paced`` is one more, for a learning rate that follows the
    progress of the run. An engine checks which of them a learner implements.
    """

    @property
    def weights(self) -> Vector:
        """All trained parameters, contiguous, float32 or float64, on the CPU; schemes read and write it between windows."""

    @property
    def buffers(self) -> Vector:
        """Floating-point state that is not trained (batch-norm statistics); may be empty."""

    @property
    def integers(self) -> Vector:
        """Integer state that is not trained (int64); may be empty."""

    @property
    def lr(self) -> float:
        """Current learning rate."""

    def step(self, batch: Any) -> Step:
        """Make one local optimiser step on a mini-batch."""

    def gradient(self, batch: Any, out: Vector, accumulate: float = 0.0) -> Step:
        """Write the mean gradient of a mini-batch to ``out``, or average it there with a mean of weight ``accumulate``."""

    def evaluate(self, source: Source, batch_size: int) -> dict[str, float]:
        """Return the mean ``loss`` over all rows, ``accuracy`` where it applies, and further metrics by name."""

    def spread(self) -> bool:
        """Copy ``weights`` to the model; return True if the model holds them in a coarser type."""

    def collect(self) -> None:
        """Copy the model's state to ``weights``, ``buffers`` and ``integers``."""

    def check(self) -> None:
        """Raise if the model's parameters are no longer views of ``weights``."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the local optimiser's state as named tensors."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a state that ``state`` returned."""


@runtime_checkable
class WarmsUp(Protocol):
    """A learner that can do the slow part of its first step before the start barrier."""

    def warm_up(self, batch: Any) -> None:
        """Process one mini-batch and leave the learner unchanged."""


@runtime_checkable
class Measures(Protocol):
    """A learner that measures the norm of its last gradient, for the record."""

    def gradient_norm(self) -> float:
        """Return the norm of the last step's gradient; NaN if there is none."""


@runtime_checkable
class Recovers(Protocol):
    """A learner that can continue after NaN."""

    def recover(self) -> None:
        """Reset the local optimiser's state."""


@runtime_checkable
class Scatters(Protocol):
    """A learner for schemes whose workers start from different points."""

    def scatter(self, seed: int) -> None:
        """Move the weights to a random point."""


@runtime_checkable
class StepsAtCenter(Protocol):
    """A learner for schemes that ship gradients."""

    def center_optimizer(self, device: str = "cpu") -> VectorOptimizer:
        """Return the user's optimiser, for one flat vector on a device."""


@runtime_checkable
class Aliases(Protocol):
    """A learner whose weights can be moved into a given vector, so that replies are written directly into them."""

    @property
    def aliasable(self) -> bool:
        """True if this model's weights can be moved."""

    def alias(self, vector: Vector) -> None:
        """Use ``vector`` and its values as the weights."""


@runtime_checkable
class Reports(Protocol):
    """A learner that reports errors which do not end a validation, such as a metric that raised."""

    report: Callable[[str], None]
    """Called with a sentence; set by the caller of ``evaluate``."""


@runtime_checkable
class Saves(Protocol):
    """A learner whose model names its tensors and may have its own file format."""

    @property
    def file(self) -> str | None:
        """Name of the file that ``save`` writes; None if the model cannot be saved in its own format."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all saved tensors of the model by name."""

    def save(self, path: Path) -> None:
        """Write the model in its own format."""


def marked(learner: Learner, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prefix the names in an optimiser's state with the kind of the optimiser."""
    kind = _kind(learner)
    return {f"{kind}.{name}": tensor for name, tensor in state.items()}


def unmarked(learner: Learner, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Remove the prefixes of ``marked``; return None if the state belongs to another kind of optimiser."""
    kind = f"{_kind(learner)}."
    if not all(name.startswith(kind) for name in kept):
        return None
    return {name.removeprefix(kind): tensor for name, tensor in kept.items()}


def load_marked(learner: Learner, kept: Mapping[str, torch.Tensor]) -> bool:
    """Load a marked state into the learner; do nothing and return False if it belongs to another kind of optimiser."""
    state = unmarked(learner, kept)
    if state:
        learner.load(state)
    return state is not None


def _kind(learner: Learner) -> str:
    return str(getattr(learner, "optimizer_name", type(learner).__name__))


def is_aliasable(learner: Learner) -> TypeGuard[Aliases]:
    """Return whether the learner's weights can be moved into a given vector."""
    return isinstance(learner, Aliases) and learner.aliasable
