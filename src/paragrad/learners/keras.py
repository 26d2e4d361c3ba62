"""A compiled Keras model as a learner: its variables are views of one vector, its steps are those of ``train_on_batch``."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paragrad.data.source import Source, Weighted, all_rows, leaves, mapped
from paragrad.errors import UsageError
from paragrad.learners import kerasmodel
from paragrad.learners.batch import split
from paragrad.learners.flattened import Flattened
from paragrad.learners.kerascopy import Packed, pack, rate_of
from paragrad.learners.kerasoptimizer import KerasCenter, KerasOptimizer
from paragrad.learners.learner import Step
from paragrad.learners.measured import Measured, Metric
from paragrad.types import Vector

COLOUR = re.compile("\x1b\\[[0-9;]*m")
"""What Keras prints its messages in bold with."""


class KerasLearner(Flattened):
    """One compiled ``keras.Model`` on torch. The model given is copied; ``model`` is the learner's own."""

    def __init__(self, model: Any, *, metrics: Mapping[str, Metric] | None = None, device: str = "cpu") -> None:
        if not isinstance(model, Packed):
            kerasmodel.refuse(model)
            model = pack(model)
        self._keras = kerasmodel.library()
        self.metrics = dict(metrics or {})
        self.device = torch.device(device)
        self.model = model.open()
        kerasmodel.move(self.model, self.device)
        super().__init__(*kerasmodel.tensors(self.model))
        self._seeds = kerasmodel.seeds(self.model)
        self._variables = list(self.model.trainable_variables)
        self._custom = kerasmodel.is_custom(self.model)
        with self._keras.device(str(self.device)):
            self._optimizer = KerasOptimizer(self.model.optimizer, self._variables, self._keras)
        self._by_weight = _divides_by_weights(self.model)
        self.followed_rate = rate_of(self.model)
        """The rate that whoever trains sets while it runs; None: the optimiser's own."""
        self.model.train()

    @staticmethod
    @torch.no_grad()
    def build_on(model: Any, batch: Any) -> None:
        """Show these rows to a model, which so comes to all its variables; raise where it does not take them."""
        x, y, weight = parts(model, batch)
        try:
            output = call(model, x, training=False)
            if not kerasmodel.is_custom(model):
                model.compute_loss(x=x, y=y, y_pred=output, sample_weight=weight)
        except UsageError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AssertionError) as error:
            text = COLOUR.sub("", str(error))
            raise UsageError(f"The Keras model does not take these rows: {type(error).__name__}: {text}") from error

    # -- the vectors ----------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The learning rate now."""
        return float(self.model.optimizer.learning_rate)

    def alias(self, vector: Vector) -> None:
        """Let the variables be views of this vector; its contents count."""
        self._weights.move_to(vector)

    def check(self) -> None:
        """Raise where a variable no longer lies in the vector."""
        self.check_all(kerasmodel.tensors(self.model)[0])

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that is kept of the trained model, by the paths of its variables."""
        return {name: tensor for named in kerasmodel.tensors(self.model) for name, tensor in named}

    # -- training -------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Step:
        """One step of the local optimiser."""
        with self._keras.device(str(self.device)):
            if self._custom:
                return self._own_step(batch)
            result = self._backward(batch)
            if self.followed_rate is not None:
                self._optimizer.use_rate(self.followed_rate.value)
            self._optimizer.apply([variable.value.grad for variable in self._variables])
        return result

    def gradient(self, batch: Any, out: Vector, accumulate: float = 0.0) -> Step:
        """The mean gradient of a mini-batch."""
        with self._keras.device(str(self.device)):
            result = self._backward(batch)
        mine = torch.empty_like(out) if accumulate else out
        for piece in self._weights.pieces:
            grad = piece.tensor.grad
            part = mine[piece.lo : piece.hi]
            part.zero_() if grad is None else part.copy_(grad.reshape(-1))
        if accumulate:
            out.lerp_(mine, result.weight / (accumulate + result.weight))
        return result

    def descend(self, gradient: Vector) -> None:
        """One step of the local optimiser on a gradient that is given."""
        views = dict(zip((id(piece.tensor) for piece in self._weights.pieces), self._weights.views(gradient), strict=True))
        with self._keras.device(str(self.device)):
            self._optimizer.apply([views[id(variable.value)] for variable in self._variables])

    def warm_up(self, batch: Any) -> None:
        """One forward and backward pass that leaves no trace."""
        self.collect()
        weights, buffers, integers = self.weights.clone(), self.buffers.clone(), self.integers.clone()
        if not self._custom:  # a step of the user's own may leave any trace
            with torch.random.fork_rng(devices=[]), self._keras.device(str(self.device)):
                self._backward(batch)
            self._clear()
        self.collect()
        self.weights.copy_(weights)
        self.buffers.copy_(buffers)
        self.integers.copy_(integers)
        self.spread()
        self.check()

    @property
    def is_plain_sgd(self) -> bool:
        """Whether a step is ``w - lr * gradient`` and no more."""
        return not self._custom and self._optimizer.is_plain_sgd

    @property
    def optimizer_name(self) -> str:
        """The kind of the optimiser."""
        return f"keras-{type(self.model.optimizer).__name__}"

    def recover(self) -> None:
        """Forget the optimiser's state: it has seen NaN."""
        self._optimizer.forget()

    def scatter(self, seed: int) -> None:
        """Move to a random point: the model is made again from its configuration, which draws its weights anew."""
        name, before = type(self.model).__name__, self.weights.clone()
        state = random.getstate()
        random.seed(seed)  # where Keras's initialisers take their seeds from
        try:
            with kerasmodel.quiet():
                other = type(self.model).from_config(self.model.get_config())
                if not other.built:
                    other.build_from_config(self.model.get_build_config())
                drawn = kerasmodel.tensors(other)[0]
        except Exception as error:
            raise UsageError(
                f"{name} cannot start from a random point, since it cannot be made again from its configuration "
                f"({type(error).__name__}: {error}). Write get_config(), or choose a scheme whose workers start together."
            ) from error
        finally:
            random.setstate(state)
        with torch.no_grad():
            for (_, mine), (_, theirs) in zip(kerasmodel.tensors(self.model)[0], drawn, strict=True):
                mine.copy_(theirs)
        self.collect()
        if torch.equal(before, self.weights):
            raise UsageError(
                f"{name} cannot start from a random point: all of its initialisers have a seed of their own. Leave seed= "
                "out of them, or choose a scheme whose workers start together."
            )

    def _backward(self, batch: Any) -> Step:
        if self._custom:
            raise UsageError(
                f"{type(self.model).__name__} makes its own train_step, from which no gradient can be had: choose a scheme "
                "whose workers step for themselves, such as pg.AGN()."
            )
        x, y, weight = self._parts(batch)
        self._draw_seeds()
        self._clear()
        output = call(self.model, x, training=True)
        loss = self.model.compute_loss(x=x, y=y, y_pred=output, sample_weight=weight)
        self.model.optimizer.scale_loss(loss).backward()
        return Step(loss=float(loss.detach()), weight=self._normaliser(x, weight))

    def _own_step(self, batch: Any) -> Step:
        x, y, weight = self._parts(batch)
        self._draw_seeds()
        self.model.reset_metrics()
        logs = self.model.train_step((x, y, weight))
        if "loss" not in logs:
            raise UsageError(
                f"{type(self.model).__name__}.train_step returned {', '.join(map(repr, logs)) or 'nothing'}, but it must "
                "return a dict that has 'loss'."
            )
        return Step(loss=float(logs["loss"]), weight=self._normaliser(x, weight))

    def _clear(self) -> None:
        for variable in self._variables:
            variable.value.grad = None

    def _draw_seeds(self) -> None:
        """Dropout is to draw the same for a mini-batch wherever it is done: torch's generator was seeded for it."""
        states = [*self._seeds, kerasmodel.global_seed()]
        drawn = torch.randint(1, 2**31 - 1, (len(states),))
        with torch.no_grad():
            for state, seed in zip(states, drawn.tolist(), strict=True):
                state.copy_(torch.tensor([seed, 0]))

    def _parts(self, batch: Any) -> tuple[Any, Any, Any]:
        if self.device.type != "cpu":
            batch = mapped(batch, lambda leaf: leaf.to(self.device, non_blocking=True))
        return parts(self.model, batch)

    def _normaliser(self, x: Any, weight: torch.Tensor | None) -> float:
        return float(weight.sum()) if self._by_weight and weight is not None else float(len(leaves(x)[0]))

    # -- looking --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: Source, batch_size: int) -> dict[str, float]:
        """Mean loss, the compiled metrics as Keras computes them, and further metrics of all rows."""
        self.spread()
        self.model.eval()
        self.model.reset_metrics()
        measured = Measured(self.metrics, self.report)
        try:
            with self._keras.device(str(self.device)):
                for rows in all_rows(source, batch_size):
                    x, y, weight = self._parts(source.batch(rows))
                    self.model.test_step((x, y, weight))
                    if self.metrics:
                        measured.add(call(self.model, x, training=False), y, weight)
                return figures(self.model.get_metrics_result()) | measured.result()
        finally:
            self.model.reset_metrics()
            self.model.train()

    # -- what is kept ---------------------------------------------------------------------------------------

    def copy(self, device: torch.device | None = None) -> Any:
        """The model as it is now, in memory of its own, compiled as it was; by default on the CPU."""
        copy = pack(self.model).open()
        kerasmodel.move(copy, device or torch.device("cpu"))
        return copy

    @property
    def file(self) -> str | None:
        """The name of the file that ``save`` writes; None where Keras cannot write this model."""
        return None if kerasmodel.why_not_saved(self.model) else "model.keras"

    def save(self, path: Path) -> None:
        """Write the model as .keras."""
        kerasmodel.save(self.model, path)

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of the local optimiser's state."""
        return {name: tensor.clone() for name, tensor in self._optimizer.state().items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of ``state``."""
        self._optimizer.load(state)

    def center_optimizer(self, device: str = "cpu") -> KerasCenter:
        """The same optimiser for the center, on variables that are views of its value."""
        if self._custom:
            raise UsageError(
                f"{type(self.model).__name__} makes its own train_step, from which no gradient can be had: choose a scheme "
                "whose workers step for themselves, such as pg.AGN()."
            )
        return KerasCenter(self.copy(), device)


def call(model: Any, x: Any, *, training: bool) -> Any:
    """A model on its inputs, told whether it is trained where it asks for that."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def unwrapped(text: str) -> str:
    """What went wrong inside a layer, without what Keras says around it."""
    text = COLOUR.sub("", text)
    if not text.startswith("Exception encountered when calling"):
        return text
    return text.partition("\n")[2].partition("Arguments received by")[0].strip()


def parts(model: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Inputs, targets and weights of a mini-batch, nested as the model has them."""
    rows, weight = (batch.rows, batch.weight) if isinstance(batch, Weighted) else (batch, None)
    x, y = split(rows)
    return arranged(model, x), _listed(y), weight


def arranged(model: Any, x: Any) -> Any:
    """Several inputs as the model names them: Keras tells a list from a tuple, which data do not."""
    expected = getattr(model, "_inputs_struct", None)
    if not isinstance(x, tuple | list):
        return x
    if isinstance(expected, dict) and len(expected) == len(x):
        raise UsageError(
            f"The model's inputs have names ({', '.join(expected)}), but the rows come without: give x as a dict of arrays."
        )
    return tuple(x) if isinstance(expected, tuple) else [_listed(value) for value in x]


def _listed(tree: Any) -> Any:
    return [_listed(value) for value in tree] if isinstance(tree, tuple) else tree


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers by name; one that has a number for each class is told apart by it."""
    numbers: dict[str, float] = {}
    for name, value in found.items():
        if isinstance(value, Mapping):
            numbers |= {f"{name}_{key}": number for key, number in figures(value).items()}
            continue
        tensor = torch.as_tensor(value).detach().cpu().double().reshape(-1)
        if tensor.numel() == 1:
            numbers[name] = float(tensor)
        else:
            numbers |= {f"{name}_{index}": float(number) for index, number in enumerate(tensor)}
    if "accuracy" not in numbers and "acc" in numbers:
        numbers["accuracy"] = numbers["acc"]
    return numbers


def _divides_by_weights(model: Any) -> bool:
    losses = kerasmodel.losses(model)
    return bool(losses) and all(getattr(loss, "reduction", None) == "mean_with_sample_weight" for loss in losses)
