"""A compiled Keras model as a function of one replica's tensors, in Keras's stateless scope."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paragrad.core.flat import Piece
from paragrad.data.source import leaves
from paragrad.learners import kerasmodel
from paragrad.learners.keras import KerasLearner, call, parts
from paragrad.optim import kerasrows
from paragrad.optim.rows import RowOptimizer
from paragrad.types import Vector

KINDS = ("weights", "buffers", "integers")


def why_not(learner: KerasLearner) -> str | None:
    """Return why a Keras model's replicas cannot be computed together; None if a trial has to decide."""
    model, keras = learner.model, kerasmodel.library()
    if kerasmodel.is_custom(model):
        return f"{type(model).__name__} defines its own train_step"
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.TorchModuleWrapper):
            return f"the layer {layer.name} is a torch module, whose tensors Keras cannot replace temporarily"
        if layer.compute_dtype != layer.variable_dtype:
            return f"the layer {layer.name} computes in {layer.compute_dtype}, but holds its weights in {layer.variable_dtype}"
    return kerasrows.why_not(model.optimizer, model.trainable_variables)


class KerasRowModel:
    """A Keras model and its compiled loss, in a scope that replaces each variable by a given tensor.

    ``stateless_call`` is such a scope around ``call``. It skips ``__call__``, which, for example, sets ``training`` in the
    layers of a subclassed model, so batch-norm would differ from ``fit``. Here the model itself is called.
    """

    capturable = False  # Keras copies numbers to the device during a step, which a CUDA graph does not allow

    def __init__(self, learner: KerasLearner, device: torch.device) -> None:
        self._keras = kerasmodel.library()
        self._device = str(device)
        self._model = learner.copy(device)
        self._model.train()
        self.pieces = learner.pieces
        self._variables = [_variables(self._model, self.pieces[kind], kind) for kind in KINDS]
        self._rate = learner.followed_rate
        self._scheduled: dict[int, float] | None = {} if kerasrows.is_scheduled(self._model.optimizer) else None
        """Cached rates of a schedule by the number of steps; None: there is no schedule."""
        mine = _variables(learner.model, self.pieces["weights"], "weights")
        self.optimizer: RowOptimizer = kerasrows.rows_of(learner.model.optimizer, mine, self.pieces["weights"])
        self._clipping = kerasrows.Clipping.of(learner.model.optimizer, self.pieces["weights"])
        self.paced = self._rate is not None or self._scheduled is not None
        self.clips = self._clipping is not None

    def rate(self, progress: float, made: int) -> float:
        if self._scheduled is not None:
            if made not in self._scheduled:
                self._scheduled[made] = self._rate_after(made)
            return self._scheduled[made]
        if self._rate is None:
            return self.optimizer.lr
        # Rounded as in the optimiser's own variable.
        return float(torch.tensor(self._rate.value, dtype=self._model.optimizer._learning_rate.value.dtype))

    def _rate_after(self, steps: int) -> float:
        """Return the schedule's rate after a number of steps, as the optimiser computes it."""
        optimizer = self._model.optimizer
        with self._keras.device(self._device), torch.no_grad():
            optimizer._iterations.assign(steps)
            return float(optimizer.learning_rate)

    def state(self, slots: list[Vector], made: int) -> dict[str, torch.Tensor]:
        optimizer = self._model.optimizer
        with torch.no_grad():
            for kept, slot in zip(kerasrows.slots_of(optimizer, self._variables[0]), slots, strict=True):
                for tensor, piece in zip(kept, self.pieces["weights"], strict=True):
                    tensor.copy_(slot[piece.lo : piece.hi].view(tensor.shape))
        optimizer._iterations.assign(made)
        return {str(index): variable.value.detach() for index, variable in enumerate(optimizer.variables)}

    def slots(self, state: Mapping[str, torch.Tensor]) -> tuple[list[Vector], int]:
        optimizer = self._model.optimizer
        with torch.no_grad():
            for index, variable in enumerate(optimizer.variables):
                variable.value.copy_(state[str(index)])
        kept = kerasrows.slots_of(optimizer, self._variables[0])
        return [torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in kept], int(optimizer.iterations)

    def clip(self, gradient: torch.Tensor) -> None:
        if self._clipping is not None:
            self._clipping(gradient)

    def loss(
        self, weights: list[Vector], buffers: list[Vector], integers: list[Vector], batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, _ = parts(self._model, batch)
        given = (weights, buffers, integers)
        pairs = [pair for kind in zip(self._variables, given, strict=True) for pair in zip(*kind, strict=True)]
        scope = self._keras.StatelessScope(pairs, collect_losses=True)
        with self._keras.device(self._device), _AnyMemoryFormat(), scope:
            output = call(self._model, x, training=True)
            loss = self._model.compute_loss(x=x, y=y, y_pred=output)
        for variable, tensor in pairs[len(weights) :]:
            tensor.copy_(scope.get_current_value(variable).detach())
        return loss, loss.new_full((), float(len(leaves(x)[0])), dtype=torch.float64)


class _AnyMemoryFormat(TorchFunctionMode):
    """Answers that a tensor has the memory format Keras asks for before a convolution; vmap cannot answer for one row."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.is_contiguous and kwargs and kwargs.get("memory_format") is not torch.contiguous_format:
            return True
        return func(*args, **(kwargs or {}))


def same_steps(learner: KerasLearner) -> bool:
    """Return whether two steps for rows give the weights of the installed Keras, whose formulas may change."""
    before, state = learner.weights.clone(), learner.state()
    model = KerasRowModel(learner, before.device)
    gradient = torch.randn(before.shape, dtype=before.dtype, generator=torch.Generator().manual_seed(0)).to(before.device)
    mine = before.unsqueeze(0).clone()
    slots = [torch.zeros_like(mine) + start for start in model.optimizer.slots]
    for number, scale in enumerate((1.0, -0.5)):
        scaled = (gradient * scale).unsqueeze(0)
        learner.descend(scaled[0].clone())
        model.clip(scaled)
        made = model.optimizer.made + number
        rates = torch.full((1, 1), model.rate(0.0, made), dtype=torch.float64) if model.paced else None
        model.optimizer.step(mine, scaled, slots, torch.full((1, 1), float(made)), rates)
    learner.collect()
    moved, off = (learner.weights - before).abs().max(), (learner.weights - mine[0]).abs().max()
    rounding = 4 * torch.finfo(before.dtype).eps * before.abs().max()
    learner.weights.copy_(before)
    learner.spread()
    learner.load(state)
    fine = before.dtype == torch.float64 and not model.clips  # Keras clips with limits in float32
    return bool(off <= rounding + (1e-9 if fine else 1e-3) * moved)


def _variables(model: Any, pieces: list[Piece], kind: str) -> list[Any]:
    """Return the model's variables in the order of these pieces."""
    tensors = dict(kerasmodel.tensors(model)[KINDS.index(kind)])
    by_tensor = {id(variable.value): variable for variable in model.variables}
    return [by_tensor[id(tensors[piece.name])] for piece in pieces]
