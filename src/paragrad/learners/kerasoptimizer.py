"""The compiled optimiser of a Keras model: for a worker, and for the center on its flat vector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from paragrad.core.flat import Flat
from paragrad.errors import UsageError
from paragrad.learners import kerasmodel
from paragrad.learners.kerascopy import rate_of
from paragrad.types import Vector


class KerasOptimizer:
    """A Keras optimiser, built for these variables."""

    def __init__(self, optimizer: Any, variables: list[Any], keras: Any) -> None:
        self.keras = optimizer
        self.variables = variables
        self._library = keras
        if not optimizer.built:
            optimizer.build(variables)
        self._start = [_compact_copy(variable.value.detach()) for variable in optimizer.variables]

    def apply(self, gradients: list[torch.Tensor | None]) -> None:
        """Make one step."""
        with torch.no_grad():
            self.keras.apply(gradients, self.variables)

    def use_rate(self, rate: float) -> None:
        """Set the learning rate."""
        if rate != float(self.keras.learning_rate):
            self.keras.learning_rate = rate

    @contextlib.contextmanager
    def scaled(self, scale: float) -> Iterator[None]:
        """Scale the learning rate temporarily."""
        if scale == 1.0:
            yield
            return
        now, kept = float(self.keras.learning_rate), self.keras._learning_rate
        is_constant = isinstance(kept, self._library.Variable)
        self.keras.learning_rate = now * scale if is_constant else lambda: now * scale
        try:
            yield
        finally:
            self.keras.learning_rate = now if is_constant else kept

    @property
    def is_plain_sgd(self) -> bool:
        """True if a step is exactly ``w - lr * gradient``."""
        mine, extras = self.keras, ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps")
        return (
            isinstance(mine, self._library.optimizers.SGD)
            and not mine.momentum
            and isinstance(mine._learning_rate, self._library.Variable)
            and not any(getattr(mine, name) for name in extras)
            and all(variable.constraint is None for variable in self.variables)
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state as named tensors, which later steps change."""
        return {str(index): variable.value.detach() for index, variable in enumerate(self.keras.variables)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a state that ``state`` returned."""
        mine = self.keras.variables
        if len(state) != len(mine):
            raise UsageError(
                f"The saved optimiser state has {len(state)} tensors, but the optimiser here has {len(mine)}. Continue with "
                "the model and optimiser that the state was saved with."
            )
        with torch.no_grad():
            for index, variable in enumerate(mine):
                variable.value.copy_(state[str(index)])

    def forget(self) -> None:
        """Reset the state to its initial values."""
        with torch.no_grad():
            for variable, start in zip(self.keras.variables, self._start, strict=True):
                variable.value.copy_(start)


class KerasCenter(KerasOptimizer):
    """The compiled optimiser on the center's value, variable by variable, so that clipping and constraints are Keras's."""

    def __init__(self, model: Any, device: str) -> None:
        keras, optimizer = kerasmodel.library(), model.optimizer
        if hasattr(optimizer, "inner_optimizer"):
            raise UsageError(
                "The model is compiled with a LossScaleOptimizer (mixed_float16). Workers scale the loss, but this scheme "
                "makes the steps at the center. Use mixed_bfloat16, which needs no scale, or a scheme whose workers make the "
                "steps, such as pg.AGN()."
            )
        for loss in kerasmodel.losses(model):
            if getattr(loss, "reduction", None) == "sum":
                raise UsageError(
                    f"{type(loss).__name__} has reduction='sum', but this scheme averages gradients: use "
                    "reduction='sum_over_batch_size' (and scale the learning rate)."
                )
        kerasmodel.move(model, torch.device(device))
        self._weights = Flat(kerasmodel.tensors(model)[0], home=torch.device(device))
        if self._weights.coarse:
            raise UsageError(
                "The model's variables have a coarse type, in which the center's optimiser would lose small steps: use a "
                "mixed policy (keras.mixed_precision.set_global_policy('mixed_bfloat16')), which keeps them in float32."
            )
        self._device = device
        by_tensor = {id(variable.value): variable for variable in model.trainable_variables}
        self._in_order = [by_tensor[id(piece.tensor)] for piece in self._weights.pieces]
        with keras.device(device):
            super().__init__(optimizer, list(model.trainable_variables), keras)
        self._rate = rate_of(model)

    def step(self, vector: Vector, gradient: Vector, scale: float = 1.0) -> None:
        """Make one step on ``vector``, in place."""
        self._weights.move_to(vector)
        if self._rate is not None:
            self.use_rate(self._rate.value)
        views = dict(zip(map(id, self._in_order), self._weights.views(gradient), strict=True))
        with self._library.device(self._device), self.scaled(scale):
            self.apply([views[id(variable)] for variable in self.variables])


def _compact_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy; a single number if all elements are equal, as in moments that are still zero."""
    first = tensor.reshape(-1)[:1]
    return first.reshape(()).clone() if tensor.numel() and bool((tensor == first).all()) else tensor.clone()
