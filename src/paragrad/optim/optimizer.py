"""Optimisers by name or factory, on a module's flat vector where that gives the same result and is faster."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from paragrad.config.options import parse_fields
from paragrad.core.flat import Flat, Piece
from paragrad.errors import UsageError, unknown
from paragrad.optim.choice import Factory, Optimizer
from paragrad.optim.conjugate import ConjugateGradient
from paragrad.optim.pieces import flattened, shaped
from paragrad.types import Vector

OptimizerLike: TypeAlias = Factory | Optimizer
"""A name or a factory, or either of them with a schedule and clipping."""

OWN: Mapping[str, type[torch.optim.Optimizer]] = {"cg": ConjugateGradient}
"""Optimisers that torch lacks."""

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Rprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD")
"""torch optimisers that give bit-equal results on one flat vector and on its pieces."""

SMALL = 32_768
"""Mean number of elements per tensor below which one flat vector is faster.

A flat gradient costs three more passes over memory than separate tensors of autograd, but saves the calls per tensor. With
many small tensors the calls cost more.
"""


def names() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the optimisers of torch and of paragrad by lower-case name."""
    found = dict(OWN)
    for name, thing in vars(torch.optim).items():
        if isinstance(thing, type) and issubclass(thing, torch.optim.Optimizer) and thing is not torch.optim.Optimizer:
            found[name.lower()] = thing
    return found


def prepared(optimizer: OptimizerLike) -> Optimizer:
    """Return the choice with a factory in place of a name; raise if the name is unknown."""
    chosen = Optimizer.of(optimizer)
    make = factory(chosen.optimizer)
    return chosen if make is chosen.optimizer else replace(chosen, optimizer=make)


def factory(optimizer: Factory) -> Callable[..., torch.optim.Optimizer]:
    """Return the factory for a name; a callable is returned as it is."""
    if not isinstance(optimizer, str):
        if not callable(optimizer):
            raise UsageError(
                f"optimizer={optimizer!r} is neither a name nor callable. Give a name ('adam:lr=0.001') or a "
                "factory (functools.partial(torch.optim.Adam, lr=0.001)); an optimiser object belongs to one model "
                "and cannot be shared."
            )
        return optimizer
    known = names()
    optimizer, given = parse_fields(optimizer)
    if optimizer.lower() not in known:
        raise unknown("optimizer", optimizer, known)
    kind = known[optimizer.lower()]
    accepted = [p for p in inspect.signature(kind).parameters if p != "params"]
    for field in given:
        if field not in accepted:
            raise unknown(f"field of optimizer {optimizer!r}:", field, accepted)
    return Named(optimizer, kind, given)


@dataclass(frozen=True)
class Named:
    """Factory of an optimiser that was chosen by name."""

    name: str
    kind: type[torch.optim.Optimizer]
    given: Mapping[str, Any]

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        """Make an optimiser for these parameters."""
        try:
            return self.kind(parameters, **self.given)
        except (TypeError, ValueError) as error:
            raise UsageError(f"Optimizer {self.name!r} with {self.given} cannot be made: {error}") from error


def takes_model(make: Any) -> bool:
    """Return whether a factory takes the model instead of its parameters."""
    try:
        first = next(iter(inspect.signature(make).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    return first is not None and is_model(first)


def is_model(parameter: inspect.Parameter) -> bool:
    """Return whether a function's parameter is the model, by its name or its type."""
    hint = parameter.annotation
    typed = issubclass(hint, nn.Module) if isinstance(hint, type) else str(hint).rpartition(".")[2] == "Module"
    return parameter.name in ("model", "module") or typed


def gather(pieces: Sequence[Piece], out: Vector) -> None:
    """Write the gradients of these tensors to one vector."""
    for piece in pieces:
        grad, part = piece.tensor.grad, out[piece.lo : piece.hi]
        part.zero_() if grad is None else part.copy_(grad.reshape(-1))


class FlatOptimizer:
    """A torch optimiser bound to a module whose parameters are views of one vector.

    It steps either on the vector as one parameter (``whole``) or on the module's tensors. On the vector, the gradient of a
    parameter that a batch does not use is zero; plain PyTorch has no gradient and skips the parameter.
    """

    def __init__(self, optimizer: OptimizerLike, module: nn.Module, weights: Flat) -> None:
        self.chosen = prepared(optimizer)
        make: Any = self.chosen.optimizer
        self._weights = weights
        pieces = [piece.tensor for piece in weights.pieces]
        by_model = takes_model(make)
        self.torch: torch.optim.Optimizer = make(module if by_model else pieces)
        _refuse(self.torch, module)
        self.whole: nn.Parameter | None = None
        self.gradient: Vector | None = None
        self._views: list[torch.Tensor] = []
        small = weights.vector.numel() < SMALL * len(pieces)
        self.why_shapes = _why_shapes(self.torch, pieces, by_model=by_model)
        """Why a step on one flat vector would differ from one on the module's tensors; None if it would not."""
        if small and weights.segment is not None and self.why_shapes is None:
            self.whole = nn.Parameter(weights.segment)
            self.torch = make([self.whole])
        closure = inspect.signature(self.torch.step).parameters.get("closure")
        self.searches = closure is not None and closure.default is inspect.Parameter.empty
        """True if a step evaluates the loss at several points, and so needs a closure."""
        self._rates: list[Any] = [group.get("lr") for group in self.torch.param_groups]
        name = type(self.torch).__name__
        if self.chosen.schedule is not None and None in self._rates:
            raise UsageError(f"{name} has no learning rate that a schedule could change: leave the schedule out.")
        if self.chosen.clips and self.searches:
            raise UsageError(
                f"{name} searches along a line, which needs the unclipped gradient: leave clip_norm and clip_value out."
            )

    def set_progress(self, progress: float) -> None:
        """Set the learning rates for this share of the run."""
        if self.chosen.schedule is None:
            return
        factor = self.chosen.factor(progress)
        for group, rate in zip(self.torch.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    @property
    def lr(self) -> float:
        """Learning rate of the first group."""
        return float(self.torch.param_groups[0].get("lr", math.nan))

    @property
    def is_plain_sgd(self) -> bool:
        """True if a step is exactly ``w - lr * gradient``, with one rate for all parameters."""
        plain = {"momentum": 0, "weight_decay": 0, "maximize": False, "lr": self.lr}
        groups = self.torch.param_groups
        return (
            not self.chosen.clips
            and type(self.torch) is torch.optim.SGD
            and all(group[key] == value for group in groups for key, value in plain.items())
        )

    def clear(self) -> None:
        """Reset the gradients before a backward pass."""
        if self.whole is None:
            for piece in self._weights.pieces:
                piece.tensor.grad = None
            return
        if self.gradient is None:
            self.gradient = torch.empty_like(self.whole.data)
            self.whole.grad = self.gradient
            self._views = self._weights.views(self.gradient)
        self.gradient.zero_()
        for piece, view in zip(self._weights.pieces, self._views, strict=True):
            piece.tensor.grad = view

    def gathered(self) -> None:
        """Complete the flat gradient after a backward pass, if the model has dropped its views by zero_grad()."""
        if self.whole is None:
            return
        for piece, view in zip(self._weights.pieces, self._views, strict=True):
            grad = piece.tensor.grad
            if grad is not view:
                view.zero_() if grad is None else view.copy_(grad)

    def apply(self) -> None:
        """Make one step from the gradient of the last backward pass."""
        if self.chosen.clips:
            self.chosen.clip([piece.tensor for piece in self._weights.pieces])
        self.torch.step()

    def search(self, closure: Callable[[], float]) -> None:
        """Make one step of an optimiser that evaluates the loss itself; ``closure`` computes it and its gradient."""
        self.torch.step(closure)

    def gather(self, out: Vector) -> None:
        """Write the gradient of the last backward pass to one vector."""
        if self.gradient is not None:
            out.copy_(self.gradient)
        else:
            gather(self._weights.pieces, out)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state as named tensors, which later steps change; the names of plain numbers end in #."""
        tensors: dict[str, torch.Tensor] = {}
        for index, parameter in enumerate(self._parameters()):
            for key, value in self.torch.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{index}.{key}"] = value
                elif isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value):
                    tensors |= {f"{index}.{key}[{place}]": item for place, item in enumerate(value)}
                elif isinstance(value, int | float):
                    tensors[f"{index}.{key}#"] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        return tensors

    def forget(self) -> None:
        """Reset the state."""
        self.torch.state.clear()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a state that ``state`` returned, in the form of a flat vector or of the module's tensors."""
        device, shapes = self._parameters()[0].device, self.shapes
        if self.why_shapes is None:
            flat = any(tensor.ndim == 1 and tensor.numel() == self._weights.vector.numel() for tensor in state.values())
            each = {name.partition(".")[0] for name in state} == {str(k) for k in range(len(shapes))}
            if self.whole is None and flat:
                state = shaped(state, shapes)
            elif self.whole is not None and each and len(shapes) > 1:
                state = flattened(state, shapes, {n: t.ndim > 0 for n, t in state.items() if n.startswith("0.")})
        # torch keeps scalars (the step count) on the CPU, and the rest on the parameter's device.
        self.adopt({name: t.clone() if t.ndim == 0 else t.to(device, copy=True) for name, t in state.items()})

    def adopt(self, state: Mapping[str, torch.Tensor]) -> None:
        """Use these tensors as the state; steps write to them."""
        parameters = self._parameters()
        lists: dict[tuple[int, str], dict[int, torch.Tensor]] = {}
        for name, mine in state.items():
            index, key = name.split(".", 1)
            if int(index) >= len(parameters):
                raise UsageError(
                    f"The saved optimiser state has at least {int(index) + 1} tensors, but the optimiser here has "
                    f"{len(parameters)}. Continue with the model and optimiser that the state was saved with."
                )
            parameter = parameters[int(index)]
            if key.endswith("]"):
                key, _, place = key.removesuffix("]").partition("[")
                lists.setdefault((int(index), key), {})[int(place)] = mine
            else:
                self.torch.state[parameter][key.removesuffix("#")] = mine.item() if key.endswith("#") else mine
        for (number, key), items in lists.items():  # files list their tensors by name, so [10] comes before [2]
            self.torch.state[parameters[number]][key] = [items[place] for place in sorted(items)]

    @property
    def shapes(self) -> list[torch.Size]:
        """Shapes of the module's tensors, in the order of the vector."""
        return [piece.tensor.shape for piece in self._weights.pieces]

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.torch.param_groups for parameter in group["params"]]


def _why_shapes(optimizer: torch.optim.Optimizer, pieces: list[torch.Tensor], *, by_model: bool) -> str | None:
    """Return why a step on one flat vector would differ; None for an elementwise kind with all tensors in one group."""
    kind, groups = type(optimizer), optimizer.param_groups
    if by_model:
        return "its factory takes the model"
    if kind.__name__ not in ELEMENTWISE or kind is not getattr(torch.optim, kind.__name__):
        return f"{kind.__name__} is not known to work element by element (these do: {', '.join(ELEMENTWISE)})"
    # A factory may group the tensors by their shape, which the flat vector does not have.
    if len(groups) != 1 or [id(p) for p in groups[0]["params"]] != [id(p) for p in pieces]:
        return f"its factory puts the parameters into {len(groups)} groups, or leaves some out"
    return None


def _refuse(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"The optimizer factory returned {name}, but it must return a torch.optim.Optimizer.")
    if name == "SparseAdam":
        raise UsageError("SparseAdam needs sparse gradients, which a flat vector cannot hold: use Adam.")
    mine = {id(parameter) for parameter in module.parameters()}
    if any(id(parameter) not in mine for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            f"The optimizer factory made {name} for tensors of another model, so nothing would be trained here: each "
            "worker has its own copy. Use the parameters (or the model) that the factory is called with."
        )
