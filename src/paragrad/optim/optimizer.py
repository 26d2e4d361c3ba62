"""Optimisers by name or factory, on a module's flat vector where that is the same thing and faster."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from paragrad.config.options import parse_fields
from paragrad.core.flat import Flat
from paragrad.errors import UsageError, unknown
from paragrad.optim.choice import Factory, Optimizer
from paragrad.optim.conjugate import ConjugateGradient
from paragrad.optim.pieces import flattened, shaped
from paragrad.types import Vector

OptimizerLike: TypeAlias = Factory | Optimizer
"""A name or a factory; or either with a schedule and clipping."""

OWN: Mapping[str, type[torch.optim.Optimizer]] = {"cg": ConjugateGradient}
"""Those that torch lacks."""

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Rprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD")
"""torch optimisers that do the same on one flat vector as on its pieces (seen bit-equal)."""

SMALL = 32_768
"""Mean elements a tensor below which one flat vector is faster.

A flat gradient costs three more passes over memory than letting autograd keep its own tensors; it saves the calls
for each tensor. With many small tensors the calls weigh more.
"""


def names() -> dict[str, type[torch.optim.Optimizer]]:
    """The optimisers of torch by lower-case name, and our own."""
    found = dict(OWN)
    for name, thing in vars(torch.optim).items():
        if isinstance(thing, type) and issubclass(thing, torch.optim.Optimizer) and thing is not torch.optim.Optimizer:
            found[name.lower()] = thing
    return found


def prepared(optimizer: OptimizerLike) -> Optimizer:
    """The same with a factory in the place of a name; raises where there is none of that name."""
    chosen = Optimizer.of(optimizer)
    make = factory(chosen.optimizer)
    return chosen if make is chosen.optimizer else replace(chosen, optimizer=make)


def factory(optimizer: Factory, fields: Mapping[str, Any] | None = None) -> Callable[..., torch.optim.Optimizer]:
    """The factory behind a name; a callable is its own."""
    if not isinstance(optimizer, str):
        if not callable(optimizer):
            raise UsageError(
                f"optimizer={optimizer!r} is neither a name nor callable. Give a name ('adam:lr=0.001') or a "
                "factory (functools.partial(torch.optim.Adam, lr=0.001)); an optimiser object belongs to one model "
                "and cannot be shared."
            )
        return optimizer
    known = names()
    optimizer, written = parse_fields(optimizer)
    if optimizer.lower() not in known:
        raise unknown("optimizer", optimizer, known)
    kind = known[optimizer.lower()]
    given = {**written, **(fields or {})}
    accepted = [p for p in inspect.signature(kind).parameters if p != "params"]
    for field in given:
        if field not in accepted:
            raise unknown(f"field of optimizer {optimizer!r}:", field, accepted)

    return Named(optimizer, kind, given)


@dataclass(frozen=True)
class Named:
    """The factory behind a name."""

    name: str
    kind: type[torch.optim.Optimizer]
    given: Mapping[str, Any]

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        """One for these parameters."""
        try:
            return self.kind(parameters, **self.given)
        except (TypeError, ValueError) as error:
            raise UsageError(f"Optimizer {self.name!r} with {self.given} cannot be made: {error}") from error


def takes_model(make: Callable[..., Any]) -> bool:
    """Whether a factory asks for the model instead of its parameters."""
    try:
        first = next(iter(inspect.signature(make).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    return first is not None and is_model(first)


def asks_for_model(optimizer: OptimizerLike) -> bool:
    """Whether an optimiser is made by a factory that asks for the model, whose other tensors it can then reach."""
    return takes_model(factory(Optimizer.of(optimizer).optimizer))


def is_model(parameter: inspect.Parameter) -> bool:
    """Whether a function's parameter is the model, by its name or its type."""
    hint = parameter.annotation
    typed = issubclass(hint, nn.Module) if isinstance(hint, type) else str(hint).rpartition(".")[2] == "Module"
    return parameter.name in ("model", "module") or typed


class FlatOptimizer:
    """A torch optimiser bound to a module whose parameters lie in one vector.

    ``flat`` mode hands it the vector as one parameter; ``pieces`` mode the module's own tensors. In flat mode the
    gradient of a parameter that a batch does not use is zero, where plain PyTorch has none and passes it over.
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
        """Why one flat vector is not the same to it as the module's tensors; None where it is."""
        if small and weights.segment is not None and self.why_shapes is None:
            self.whole = nn.Parameter(weights.segment)
            self.torch = make([self.whole])
        self.searches = _needs_closure(self.torch)
        """Whether a step evaluates the loss at several points, so that it needs a closure."""
        self._rates: list[Any] = [group.get("lr") for group in self.torch.param_groups]
        self._check_choice()

    def _check_choice(self) -> None:
        name, chosen = type(self.torch).__name__, self.chosen
        if chosen.schedule is not None and None in self._rates:
            raise UsageError(f"{name} has no learning rate that a schedule could change: leave the schedule out.")
        if chosen.clips and self.searches:
            raise UsageError(
                f"{name} searches along a line, for which it needs the gradient as it is: leave clip_norm and clip_value out."
            )

    def set_progress(self, progress: float) -> None:
        """Take the learning rates for this share of the run."""
        if self.chosen.schedule is None:
            return
        factor = self.chosen.factor(progress)
        for group, rate in zip(self.torch.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    @property
    def lr(self) -> float:
        """The first group's learning rate."""
        return float(self.torch.param_groups[0].get("lr", math.nan))

    @property
    def is_plain_sgd(self) -> bool:
        """Whether a step is ``w - lr * gradient`` and no more, with one rate for all."""
        plain = {"momentum": 0, "weight_decay": 0, "maximize": False, "lr": self.lr}
        groups = self.torch.param_groups
        return (
            not self.chosen.clips
            and type(self.torch) is torch.optim.SGD
            and all(group[key] == value for group in groups for key, value in plain.items())
        )

    def clear(self) -> None:
        """Before a backward pass."""
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
        """After a backward pass: a model that calls zero_grad() itself has dropped the views of the flat gradient."""
        if self.whole is None:
            return
        for piece, view in zip(self._weights.pieces, self._views, strict=True):
            grad = piece.tensor.grad
            if grad is not view:
                view.zero_() if grad is None else view.copy_(grad)

    def step(self) -> None:
        """One step from the gradient of the last backward pass."""
        if self.chosen.clips:
            self.chosen.clip([piece.tensor for piece in self._weights.pieces])
        self.torch.step()

    def search(self, closure: Callable[[], float]) -> None:
        """One step of an optimiser that evaluates the loss itself; ``closure`` computes it and its gradient."""
        self.torch.step(closure)

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
        """Its state as named tensors, live; plain numbers are marked by a trailing #."""
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
        """Begin anew, as after it was made."""
        self.torch.state.clear()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of ``state``; also of that of a flat vector where this has the module's tensors, or the other way."""
        device, shapes = self._parameters()[0].device, [piece.tensor.shape for piece in self._weights.pieces]
        if self.why_shapes is None and len(shapes) > 1:
            flat = any(tensor.ndim == 1 and tensor.numel() == self._weights.vector.numel() for tensor in state.values())
            if self.whole is None and flat:
                state = shaped(state, shapes)
            elif self.whole is not None and {name.partition(".")[0] for name in state} == {str(k) for k in range(len(shapes))}:
                state = flattened(state, shapes, {n: t.ndim > 0 for n, t in state.items() if n.startswith("0.")})
        # torch keeps scalars (the step count) on the CPU, and the rest beside the parameter.
        self.adopt({name: t.clone() if t.ndim == 0 else t.to(device, copy=True) for name, t in state.items()})

    def adopt(self, state: Mapping[str, torch.Tensor]) -> None:
        """Let these tensors be the state: steps write into them."""
        parameters = self._parameters()
        for name, mine in state.items():
            index, key = name.split(".", 1)
            if int(index) >= len(parameters):
                raise UsageError(
                    f"The optimiser's state is of at least {int(index) + 1} tensors, but it has {len(parameters)} here. Go on "
                    "with the model and optimiser that the state was saved with."
                )
            parameter = parameters[int(index)]
            if key.endswith("]"):
                self.torch.state[parameter].setdefault(key.partition("[")[0], []).append(mine)
            else:
                self.torch.state[parameter][key.removesuffix("#")] = mine.item() if key.endswith("#") else mine

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.torch.param_groups for parameter in group["params"]]


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _why_shapes(optimizer: torch.optim.Optimizer, pieces: list[torch.Tensor], *, by_model: bool) -> str | None:
    """None where one flat vector is the same to it: of a kind that is so, with all tensors in one group."""
    kind, groups = type(optimizer), optimizer.param_groups
    if by_model:
        return "its factory asks for the model"
    if kind.__name__ not in ELEMENTWISE or kind is not getattr(torch.optim, kind.__name__):
        return f"{kind.__name__} is not known to work element by element (those that do: {', '.join(ELEMENTWISE)})"
    # A factory may sort the tensors into groups by their shape, which the flat vector does not have.
    if len(groups) != 1 or [id(p) for p in groups[0]["params"]] != [id(p) for p in pieces]:
        return f"its factory sorts the parameters into {len(groups)} groups, or leaves some out"
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
            f"The optimizer factory made {name} for tensors of another model, so that nothing would be trained here: each "
            "worker has its own copy. Use the parameters (or the model) that the factory is called with."
        )
