"""What a learner is: one model as local steps on one flat vector. Write your own for a GAN, or a step of any kind."""

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
    """What one mini-batch did: its mean loss, and the normaliser of that mean (rows, or the sum of class weights)."""

    loss: float
    weight: float


@runtime_checkable
class Learner(Protocol):
    """One model as local steps on one flat vector; ``pg.train`` takes a function that makes one.

    What more it may be able to do are protocols of their own, below (and ``types.Paced``: a learning rate that goes by the
    progress of the run): an engine looks whether they are there.
    """

    @property
    def weights(self) -> Vector:
        """All trained parameters, contiguous, float32 or float64, on the CPU; schemes read and write it between windows."""

    @property
    def buffers(self) -> Vector:
        """Floating state that is not trained (batch-norm statistics); may be empty."""

    @property
    def integers(self) -> Vector:
        """Integer state that is not trained (int64); may be empty."""

    @property
    def lr(self) -> float:
        """The learning rate now."""

    def step(self, batch: Any) -> Step:
        """One local optimiser step on a mini-batch."""

    def gradient(self, batch: Any, out: Vector, accumulate: float = 0.0) -> Step:
        """The mean gradient of a mini-batch into ``out``, joined with a mean of weight ``accumulate`` that is there."""

    def evaluate(self, source: Source, batch_size: int) -> dict[str, float]:
        """Mean ``loss`` over all rows, ``accuracy`` where it has a meaning, and further metrics by name."""

    def spread(self) -> bool:
        """Bring the model up to date with ``weights``; True where the model holds them in a coarser type."""

    def collect(self) -> None:
        """Bring ``weights``, ``buffers`` and ``integers`` up to date with the model."""

    def check(self) -> None:
        """Raise where the model's parameters no longer lie in ``weights``."""

    def state(self) -> dict[str, torch.Tensor]:
        """The local optimiser's state as named tensors."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of ``state``."""


@runtime_checkable
class WarmsUp(Protocol):
    """A learner that can do before the start barrier what only the first step would else wait for."""

    def warm_up(self, batch: Any) -> None:
        """Run through a mini-batch and leave everything as it was."""


@runtime_checkable
class Measures(Protocol):
    """A learner that can tell how long its last gradient was, for the record."""

    def gradient_norm(self) -> float:
        """Return the length of the last step's gradient; NaN where there is none."""


@runtime_checkable
class Recovers(Protocol):
    """A learner that can go on after NaN."""

    def recover(self) -> None:
        """Forget the local optimiser's state."""


@runtime_checkable
class Scatters(Protocol):
    """A learner for schemes whose workers start apart."""

    def scatter(self, seed: int) -> None:
        """Move the weights to a random point."""


@runtime_checkable
class StepsAtCenter(Protocol):
    """A learner for schemes that ship gradients."""

    def center_optimizer(self, device: str = "cpu") -> VectorOptimizer:
        """The user's optimiser, for one flat vector on a device."""


@runtime_checkable
class Aliases(Protocol):
    """A learner whose weights can be put into memory that is given; an answer is then written straight into them."""

    @property
    def aliasable(self) -> bool:
        """Whether this model's can."""

    def alias(self, vector: Vector) -> None:
        """Let ``vector`` be the weights, with what it holds."""


@runtime_checkable
class Reports(Protocol):
    """A learner that says what went wrong in a validation that went on, such as a metric that raised."""

    report: Callable[[str], None]
    """Called with a sentence; whoever asks for validations sets it."""


@runtime_checkable
class Saves(Protocol):
    """A learner whose model has names for its tensors, and perhaps a file format of its own."""

    @property
    def file(self) -> str | None:
        """The name of the file that ``save`` writes; None: there is none."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that is kept of the model, by name."""

    def save(self, path: Path) -> None:
        """Write the model in its own format."""


def marked(learner: Learner, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state under names that say of which optimiser it is."""
    kind = _kind(learner)
    return {f"{kind}.{name}": tensor for name, tensor in state.items()}


def unmarked(learner: Learner, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """The inverse; None where it is of another optimiser than the learner's."""
    kind = f"{_kind(learner)}."
    if not all(name.startswith(kind) for name in kept):
        return None
    return {name.removeprefix(kind): tensor for name, tensor in kept.items()}


def load_marked(learner: Learner, kept: Mapping[str, torch.Tensor]) -> bool:
    """Let the learner's optimiser go on from such a state; False, and nothing is done, where it is of another optimiser."""
    state = unmarked(learner, kept)
    if state:
        learner.load(state)
    return state is not None


def _kind(learner: Learner) -> str:
    return str(getattr(learner, "optimizer_name", type(learner).__name__))


def is_aliasable(learner: Learner) -> TypeGuard[Aliases]:
    """Whether the learner's weights can be put into memory that is given."""
    return isinstance(learner, Aliases) and learner.aliasable
