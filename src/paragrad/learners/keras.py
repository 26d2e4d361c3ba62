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
from paragrad.optim.optimizer import gather
from paragrad.types import Vector

COLOUR = re.compile("\x1b\\[[0-9;]*m")
"""Escape sequences in Keras's messages, which make them bold."""


class KerasLearner(Flattened):
    """One compiled ``keras.Model`` on torch. The learner copies the given model; ``model`` is the copy."""

    _optimizer: KerasOptimizer

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
        reductions = [getattr(loss, "reduction", None) for loss in kerasmodel.losses(self.model)]
        self._by_weight = bool(reductions) and all(one == "mean_with_sample_weight" for one in reductions)
        """True if the mean loss is divided by the sum of the row weights."""
        self.followed_rate = rate_of(self.model)
        """Learning rate that the trainer sets during the run; None: the optimiser's own."""
        self.model.train()

    @staticmethod
    @torch.no_grad()
    def build_on(model: Any, batch: Any) -> None:
        """Call a model on these rows, which creates all its variables; raise if it does not take them."""
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
        """Current learning rate."""
        return float(self.model.optimizer.learning_rate)

    def alias(self, vector: Vector) -> None:
        """Make the variables views of this vector; they take its values."""
        self._weights.move_to(vector)

    def check(self) -> None:
        """Raise if a variable is no longer a view of the vector."""
        self.check_all(kerasmodel.tensors(self.model)[0])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all saved tensors of the model by the paths of its variables."""
        return {name: tensor for named in kerasmodel.tensors(self.model) for name, tensor in named}

    # -- training -------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Step:
        """Make one step of the local optimiser."""
        with self._keras.device(str(self.device)):
            if self._custom:
                return self._custom_step(batch)
            result = self._backward(batch)
            if self.followed_rate is not None:
                self._optimizer.use_rate(self.followed_rate.value)
            self._optimizer.apply([variable.value.grad for variable in self._variables])
        return result

    def gradient(self, batch: Any, out: Vector, accumulate: float = 0.0) -> Step:
        """Write the mean gradient of a mini-batch to ``out``, or average it there with a mean of weight ``accumulate``."""
        with self._keras.device(str(self.device)):
            result = self._backward(batch)
        mine = torch.empty_like(out) if accumulate else out
        gather(self._weights.pieces, mine)
        if accumulate:
            out.lerp_(mine, result.weight / (accumulate + result.weight))
        return result

    def descend(self, gradient: Vector) -> None:
        """Make one step of the local optimiser on a given gradient."""
        views = dict(zip((id(piece.tensor) for piece in self._weights.pieces), self._weights.views(gradient), strict=True))
        with self._keras.device(str(self.device)):
            self._optimizer.apply([views[id(variable.value)] for variable in self._variables])

    def warm_up(self, batch: Any) -> None:
        """Make one forward and backward pass and leave the learner unchanged."""
        self.collect()
        with self.unchanged():
            if not self._custom:  # a user-defined step may change anything
                with torch.random.fork_rng(devices=[]), self._keras.device(str(self.device)):
                    self._backward(batch)
                self._clear()
            self.collect()
        self.check()

    @property
    def is_plain_sgd(self) -> bool:
        """True if a step is exactly ``w - lr * gradient``."""
        return not self._custom and self._optimizer.is_plain_sgd

    @property
    def optimizer_name(self) -> str:
        """Class name of the optimiser."""
        return f"keras-{type(self.model.optimizer).__name__}"

    def scatter(self, seed: int) -> None:
        """Move to a random point: a model made from the same configuration draws the weights."""
        name, before = type(self.model).__name__, self.weights.clone()
        state = random.getstate()
        random.seed(seed)  # Keras's initialisers take their seeds from this generator
        try:
            with kerasmodel.quiet():
                other = type(self.model).from_config(self.model.get_config())
                if not other.built:
                    other.build_from_config(self.model.get_build_config())
                drawn = kerasmodel.tensors(other)[0]
        except Exception as error:
            raise UsageError(
                f"{name} cannot start from a random point, because it cannot be made again from its configuration "
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
                f"{name} cannot start from a random point: all of its initialisers have a seed. Leave seed= out of them, or "
                "choose a scheme whose workers start together."
            )

    def _backward(self, batch: Any) -> Step:
        self._refuse_custom()
        x, y, weight = self._parts(batch)
        self._draw_seeds()
        self._clear()
        output = call(self.model, x, training=True)
        loss = self.model.compute_loss(x=x, y=y, y_pred=output, sample_weight=weight)
        self.model.optimizer.scale_loss(loss).backward()
        return Step(loss=float(loss.detach()), weight=self._normaliser(x, weight))

    def _refuse_custom(self) -> None:
        if self._custom:
            raise UsageError(
                f"{type(self.model).__name__} defines its own train_step, which gives no gradient: choose a scheme whose "
                "workers make the steps, such as pg.AGN()."
            )

    def _custom_step(self, batch: Any) -> Step:
        x, y, weight = self._parts(batch)
        self._draw_seeds()
        self.model.reset_metrics()
        logs = self.model.train_step((x, y, weight))
        if "loss" not in logs:
            raise UsageError(
                f"{type(self.model).__name__}.train_step returned {', '.join(map(repr, logs)) or 'nothing'}, but it must "
                "return a dict with 'loss'."
            )
        return Step(loss=float(logs["loss"]), weight=self._normaliser(x, weight))

    def _clear(self) -> None:
        for variable in self._variables:
            variable.value.grad = None

    def _draw_seeds(self) -> None:
        """Seed Keras's generators from torch's, which is seeded per mini-batch: dropout is then the same on every worker."""
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

    # -- evaluation -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: Source, batch_size: int) -> dict[str, float]:
        """Return mean loss, the compiled metrics as Keras computes them, and further metrics of all rows."""
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

    # -- copies and files -----------------------------------------------------------------------------------

    def copy(self, device: torch.device | None = None) -> Any:
        """Return a compiled copy of the current model; by default on the CPU."""
        copy = pack(self.model).open()
        kerasmodel.move(copy, device or torch.device("cpu"))
        return copy

    @property
    def file(self) -> str | None:
        """Name of the file that ``save`` writes; None if Keras cannot write this model."""
        return None if kerasmodel.why_not_saved(self.model) else "model.keras"

    def save(self, path: Path) -> None:
        """Write the model as .keras."""
        with kerasmodel.quiet():
            self.model.save(path)

    def center_optimizer(self, device: str = "cpu") -> KerasCenter:
        """Return the same optimiser for the center, on variables that are views of its value."""
        self._refuse_custom()
        return KerasCenter(self.copy(), device)


def call(model: Any, x: Any, *, training: bool) -> Any:
    """Call a model on its inputs; pass ``training`` if it takes it."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def unwrapped(text: str) -> str:
    """Return the error message of a layer without the text that Keras adds around it."""
    text = COLOUR.sub("", text)
    if not text.startswith("Exception encountered when calling"):
        return text
    return text.partition("\n")[2].partition("Arguments received by")[0].strip()


def parts(model: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Return inputs, targets and weights of a mini-batch, nested as the model expects."""
    rows, weight = (batch.rows, batch.weight) if isinstance(batch, Weighted) else (batch, None)
    x, y = split(rows)
    return arranged(model, x), _listed(y), weight


def arranged(model: Any, x: Any) -> Any:
    """Return several inputs nested as the model expects: unlike the data, Keras distinguishes lists from tuples."""
    expected = getattr(model, "_inputs_struct", None)
    if not isinstance(x, tuple | list):
        return x
    if isinstance(expected, dict) and len(expected) == len(x):
        raise UsageError(
            f"The model's inputs have names ({', '.join(expected)}), but the rows have none: give x as a dict of arrays."
        )
    return tuple(x) if isinstance(expected, tuple) else [_listed(value) for value in x]


def _listed(tree: Any) -> Any:
    return [_listed(value) for value in tree] if isinstance(tree, tuple) else tree


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as plain numbers by name; a metric with one number per class gets the class in its name."""
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
