"""The compiled optimiser of a Keras model: a worker's own, and the center's on its one flat vector."""

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


class KerasCenter:
    """The compiled optimiser on the center's value: variable by variable, so that clipping and constraints are as in Keras."""

    def __init__(self, model: Any, device: str) -> None:
        keras, optimizer = kerasmodel.library(), model.optimizer
        if hasattr(optimizer, "inner_optimizer"):
            raise UsageError(
                "The model is compiled with a LossScaleOptimizer (mixed_float16), whose scale belongs to whoever makes the "
                "loss, but this scheme steps at the center: use mixed_bfloat16, which needs none, or a scheme whose workers "
                "step for themselves, such as pg.AGN()."
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
                "The model's variables are of a coarse type, in which the center's optimiser would lose small steps: use a "
                "mixed policy (keras.mixed_precision.set_global_policy('mixed_bfloat16')), which keeps them in float32."
            )
        self._device = device
        self._keras = keras
        self._by_tensor = {id(variable.value): variable for variable in model.trainable_variables}
        self._variables = [self._by_tensor[id(piece.tensor)] for piece in self._weights.pieces]
        with keras.device(device):
            self._optimizer = KerasOptimizer(optimizer, list(model.trainable_variables), keras)
        self._rate = rate_of(model)

    def step(self, vector: Vector, gradient: Vector, scale: float = 1.0) -> None:
        """One step on ``vector``, in place."""
        self._weights.move_to(vector)
        if self._rate is not None:
            self._optimizer.use_rate(self._rate.value)
        views = dict(zip(map(id, self._variables), self._weights.views(gradient), strict=True))
        with self._keras.device(self._device), self._optimizer.scaled(scale):
            self._optimizer.apply([views[id(variable)] for variable in self._optimizer.variables])

    def state(self) -> dict[str, torch.Tensor]:
        """The optimiser's state as named tensors."""
        return self._optimizer.state()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of ``state``."""
        self._optimizer.load(state)


class KerasOptimizer:
    """A Keras optimiser, built for these variables."""

    def __init__(self, optimizer: Any, variables: list[Any], keras: Any) -> None:
        self.keras = optimizer
        self.variables = variables
        self._variable_type = keras.Variable
        self._library = keras
        if not optimizer.built:
            optimizer.build(variables)
        self._start = [_spare(variable.value.detach()) for variable in optimizer.variables]

    def apply(self, gradients: list[torch.Tensor | None]) -> None:
        """One step."""
        with torch.no_grad():
            self.keras.apply(gradients, self.variables)

    def use_rate(self, rate: float) -> None:
        """From now on, where it is another."""
        if rate != float(self.keras.learning_rate):
            self.keras.learning_rate = rate

    @contextlib.contextmanager
    def scaled(self, scale: float) -> Iterator[None]:
        """With another learning rate for a while."""
        if scale == 1.0:
            yield
            return
        now, kept = float(self.keras.learning_rate), self.keras._learning_rate
        is_constant = isinstance(kept, self._variable_type)
        self.keras.learning_rate = now * scale if is_constant else lambda: now * scale
        try:
            yield
        finally:
            self.keras.learning_rate = now if is_constant else kept

    @property
    def is_plain_sgd(self) -> bool:
        """Whether a step is ``w - lr * gradient`` and no more."""
        mine, plain = self.keras, ("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps")
        return (
            isinstance(mine, self._library.optimizers.SGD)
            and not mine.momentum
            and isinstance(mine._learning_rate, self._variable_type)
            and all(not getattr(mine, name) for name in plain)
            and all(variable.constraint is None for variable in self.variables)
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Its state as named tensors, live."""
        return {str(index): variable.value.detach() for index, variable in enumerate(self.keras.variables)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of ``state``."""
        mine = self.keras.variables
        if len(state) != len(mine):
            raise UsageError(
                f"The optimiser's state is of {len(state)} tensors, but it has {len(mine)} here. Go on with the model and "
                "optimiser that the state was saved with."
            )
        with torch.no_grad():
            for index, variable in enumerate(mine):
                variable.value.copy_(state[str(index)])

    def forget(self) -> None:
        """Begin anew, as after it was made."""
        with torch.no_grad():
            for variable, start in zip(self.keras.variables, self._start, strict=True):
                variable.value.copy_(start)


def _spare(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; one number where all are the same, as in moments that are still zero."""
    first = tensor.reshape(-1)[:1]
    return first.reshape(()).clone() if tensor.numel() and bool((tensor == first).all()) else tensor.clone()
