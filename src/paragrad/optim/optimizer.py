"""Optimisers by name or factory, on a module's flat vector where that is the same thing and faster."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from paragrad.errors import UsageError, unknown
from paragrad.flat import Flat
from paragrad.types import Vector

OptimizerLike: TypeAlias = str | Callable[..., torch.optim.Optimizer]
"""A name with fields (``"adam:lr=0.001"``), or a factory that takes the parameters, or one that takes the ``model``."""

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Rprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD")
"""torch optimisers that do the same on one flat vector as on its pieces (seen bit-equal)."""

SMALL = 32_768
"""Mean elements a tensor below which one flat vector is faster.

A flat gradient costs three more passes over memory than letting autograd keep its own tensors; it saves the calls
for each tensor. With many small tensors the calls weigh more.
"""


def names() -> dict[str, type[torch.optim.Optimizer]]:
    """The optimisers of torch by lower-case name."""
    found = {}
    for name, thing in vars(torch.optim).items():
        if isinstance(thing, type) and issubclass(thing, torch.optim.Optimizer) and thing is not torch.optim.Optimizer:
            found[name.lower()] = thing
    return found


def factory(optimizer: OptimizerLike, fields: Mapping[str, Any] | None = None) -> Callable[..., torch.optim.Optimizer]:
    """The factory behind a name; a callable is its own."""
    if not isinstance(optimizer, str):
        if not callable(optimizer):
            raise UsageError(
                f"optimizer={optimizer!r} is neither a name nor callable. Give a name ('adam:lr=0.001') or a factory "
                "(functools.partial(torch.optim.Adam, lr=0.001)); an optimiser object belongs to one model and cannot be shared."
            )
        return optimizer
    known = names()
    if optimizer.lower() not in known:
        raise unknown("optimizer", optimizer, known)
    kind = known[optimizer.lower()]
    given = dict(fields or {})
    accepted = [p for p in inspect.signature(kind).parameters if p != "params"]
    for field in given:
        if field not in accepted:
            raise unknown(f"field of optimizer {optimizer!r}:", field, accepted)

    def make(parameters: Any) -> torch.optim.Optimizer:
        try:
            return kind(parameters, **given)
        except (TypeError, ValueError) as error:
            raise UsageError(f"Optimizer {optimizer!r} with {given} cannot be made: {error}") from error

    return make


def takes_model(make: Callable[..., Any]) -> bool:
    """Whether a factory asks for the model instead of its parameters."""
    try:
        first = next(iter(inspect.signature(make).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    return first is not None and (first.name in ("model", "module") or first.annotation in (nn.Module, "nn.Module"))


class FlatOptimizer:
    """A torch optimiser bound to a module whose parameters lie in one vector.

    ``flat`` mode hands it the vector as one parameter; ``pieces`` mode the module's own tensors.
    """

    def __init__(self, make: Callable[..., torch.optim.Optimizer], module: nn.Module, weights: Flat) -> None:
        self._weights = weights
        pieces = [piece.tensor for piece in weights.pieces]
        whole = nn.Parameter(weights.vector) if not weights.coarse else None
        by_model = takes_model(make)
        torch_optimizer = make(module if by_model else pieces)
        self._refuse(torch_optimizer)
        small = weights.vector.numel() < SMALL * len(pieces)
        self.whole: nn.Parameter | None = None
        if small and whole is not None and not by_model and type(torch_optimizer).__name__ in ELEMENTWISE:
            self.whole = whole
            torch_optimizer = make([whole])
        self.torch = torch_optimizer
        self._bind(torch.zeros_like(weights.vector) if self.whole is not None else None)

    @staticmethod
    def _refuse(optimizer: torch.optim.Optimizer) -> None:
        name = type(optimizer).__name__
        if name == "SparseAdam":
            raise UsageError("SparseAdam needs sparse gradients, which a flat vector cannot hold: use Adam.")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if name == "LBFGS" or (closure is not None and closure.default is inspect.Parameter.empty):
            raise UsageError(
                f"{name} calls a closure several times a step, which a scheme cannot exchange: choose an optimiser that makes one "
                "step from one gradient, such as Adam or SGD."
            )

    def _bind(self, gradient: Vector | None) -> None:
        self.gradient = gradient
        if self.whole is not None:
            assert gradient is not None
            self.whole.grad = gradient
            for piece, view in zip(self._weights.pieces, self._weights.views(gradient), strict=True):
                piece.tensor.grad = view

    @property
    def lr(self) -> float:
        """The first group's learning rate."""
        return float(self.torch.param_groups[0]["lr"])

    def clear(self) -> None:
        """Before a backward pass."""
        if self.gradient is not None:
            self.gradient.zero_()
        else:
            for piece in self._weights.pieces:
                piece.tensor.grad = None

    def step(self) -> None:
        """After a backward pass."""
        self.torch.step()

    def gather(self, out: Vector) -> None:
        """The gradient of the last backward pass, as one vector."""
        if self.gradient is not None:
            out.copy_(self.gradient)
            return
        for piece in self._weights.pieces:
            grad = piece.tensor.grad
            if grad is None:
                out[piece.lo : piece.hi].zero_()
            else:
                out[piece.lo : piece.hi].copy_(grad.reshape(-1))

    def state(self) -> dict[str, torch.Tensor]:
        """Its state as named tensors; plain numbers are marked by a trailing #."""
        tensors: dict[str, torch.Tensor] = {}
        parameters = [p for group in self.torch.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            for key, value in self.torch.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{index}.{key}"] = value
                elif isinstance(value, int | float):
                    tensors[f"{index}.{key}#"] = torch.tensor(float(value), dtype=torch.float64)
        return tensors

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of ``state``."""
        parameters = [p for group in self.torch.param_groups for p in group["params"]]
        for name, tensor in state.items():
            index, key = name.split(".", 1)
            mine = self.torch.state[parameters[int(index)]]
            mine[key.rstrip("#")] = float(tensor) if key.endswith("#") else tensor.clone()


class CenterOptimizer:
    """The user's optimiser on the center's value: shaped views where the optimiser looks at shapes."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], module: nn.Module, weights: Flat) -> None:
        self._weights = weights
        self._inner = FlatOptimizer(make, module, weights)

    def step(self, vector: Vector, gradient: Vector, scale: float = 1.0) -> None:
        """One step on ``vector``, in place."""
        inner = self._inner
        if inner.whole is not None:
            inner.whole.data = vector
            inner.whole.grad = gradient
        else:
            self._weights.move_to(vector)
            for piece, view in zip(self._weights.pieces, self._weights.views(gradient), strict=True):
                piece.tensor.grad = view
        rates = [group["lr"] for group in inner.torch.param_groups]
        for group, rate in zip(inner.torch.param_groups, rates, strict=True):
            group["lr"] = rate * scale
        inner.torch.step()
        for group, rate in zip(inner.torch.param_groups, rates, strict=True):
            group["lr"] = rate

    def state(self) -> dict[str, torch.Tensor]:
        """The optimiser's state as named tensors."""
        return self._inner.state()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of ``state``."""
        self._inner.load(state)

