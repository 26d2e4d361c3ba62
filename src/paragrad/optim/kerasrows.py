"""Keras's optimisers for rows, with Keras's formulas: their epsilons, bias corrections and decay differ from torch's.

Keras computes powers of the betas in the type of the weights, and some factors in that of the learning rate (``floatx``,
float32 by default). This module uses the same types: 1 - 0.999 in float32 is off by 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paragrad.core.flat import Piece
from paragrad.optim.rows import RowOptimizer, Tensors, Update

LIBRARY = "keras."
"""Prefix of the modules of Keras's own classes; a user's subclass may step in any way."""


@dataclass(frozen=True)
class _Kind:
    """Update rule, options and state variables of a Keras optimiser."""

    update: Update
    options: tuple[str, ...]
    slots: Callable[[Any], list[list[Any]]]


def why_not(optimizer: Any, variables: Sequence[Any]) -> str | None:
    """Return why this Keras optimiser's steps on these variables cannot be made for rows; None if they can."""
    kind = type(optimizer)
    if kind.__name__ not in TABLE or not kind.__module__.startswith(LIBRARY):
        return f"the optimiser {kind.__name__} has no batched version"
    if not (hasattr(optimizer._learning_rate, "value") or is_scheduled(optimizer)):
        return "the optimiser's learning rate is a custom function"
    for name in ("gradient_accumulation_steps", "loss_scale_factor", "use_ema"):
        if getattr(optimizer, name):
            return f"the optimiser has {name}={getattr(optimizer, name)}"
    for variable in variables:
        if variable.constraint is not None:
            return f"the variable {variable.path} has a constraint"
        if getattr(variable, "overwrite_with_gradient", False):
            return f"the variable {variable.path} is overwritten by its gradient"
    return None


def is_scheduled(optimizer: Any) -> bool:
    """Return whether the rate is a Keras schedule, a function of the number of steps."""
    return "LearningRateSchedule" in {kind.__name__ for kind in type(optimizer._learning_rate).__mro__}


def rows_of(optimizer: Any, variables: Sequence[Any], pieces: Sequence[Piece]) -> RowOptimizer:
    """Return the same optimiser for rows; it is built for ``variables``, and ``pieces`` are their positions."""
    kind = TABLE[type(optimizer).__name__]
    options = {name: getattr(optimizer, name) for name in kind.options}
    options["lr"] = float(optimizer.learning_rate)
    starts = tuple(_start(kept) for kept in slots_of(optimizer, variables))
    update = kind.update
    if optimizer.weight_decay is not None:
        rate = optimizer._get_current_learning_rate()
        kind_of_rate = getattr(rate, "value", rate).dtype
        decayed = [p for v, p in zip(variables, pieces, strict=True) if optimizer._use_weight_decay(v)]
        update = _Decaying(update, optimizer.weight_decay, kind_of_rate, _ranges(decayed))
    return RowOptimizer(update, options, starts, made=int(optimizer.iterations))


def slots_of(optimizer: Any, variables: Sequence[Any]) -> list[list[torch.Tensor]]:
    """Return the optimiser's state vectors, each as one tensor per variable; later steps change them."""
    index = [optimizer._get_variable_index(variable) for variable in variables]
    return [[kept[k].value.detach() for k in index] for kept in TABLE[type(optimizer).__name__].slots(optimizer)]


def _start(tensors: list[torch.Tensor]) -> float | torch.Tensor:
    vector = torch.cat([tensor.reshape(-1) for tensor in tensors])
    first = float(vector[0])
    return first if bool((vector == first).all()) else vector


def _ranges(pieces: list[Piece]) -> list[tuple[int, int]]:
    """Return the ranges of these pieces; adjacent pieces form one range."""
    ranges: list[tuple[int, int]] = []
    for piece in pieces:
        if ranges and ranges[-1][1] == piece.lo:
            ranges[-1] = ranges[-1][0], piece.hi
        else:
            ranges.append((piece.lo, piece.hi))
    return ranges


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping of a Keras optimiser: per variable (``clipnorm``), as a whole, or value by value."""

    kind: str
    limit: float
    pieces: Sequence[Piece]

    @classmethod
    def of(cls, optimizer: Any, pieces: Sequence[Piece]) -> Clipping | None:
        """Return the clipping of a Keras optimiser; None if it does not clip."""
        for kind in ("clipnorm", "global_clipnorm", "clipvalue"):
            limit = getattr(optimizer, kind)
            if limit and limit > 0:
                return cls(kind, limit, pieces)
        return None

    def __call__(self, gradient: torch.Tensor) -> None:
        """Clip each row, in place."""
        if self.kind == "clipvalue":
            gradient.clamp_(-self.limit, self.limit)
            return
        parts = [gradient[:, p.lo : p.hi] for p in self.pieces] if self.kind == "clipnorm" else [gradient]
        for part in parts:
            norms = torch.linalg.vector_norm(part, dim=1, keepdim=True)
            part.mul_(self.limit / norms.clamp_(min=self.limit))


@dataclass(frozen=True)
class _Decaying:
    """An update rule after weight decay, from which some weights may be excluded."""

    update: Update
    decay: float
    kind_of_rate: torch.dtype
    ranges: list[tuple[int, int]]

    def __call__(self, w: torch.Tensor, g: torch.Tensor, slots: Tensors, steps: torch.Tensor, o: dict[str, Any]) -> None:
        rate = torch.as_tensor(o["lr"], dtype=self.kind_of_rate, device=w.device)
        left = (1 - rate * self.decay).to(w.dtype)
        for lo, hi in self.ranges:
            w[:, lo:hi].mul_(left)
        self.update(w, g, slots, steps, o)


# -- the update rules of Keras --------------------------------------------------------------------------------------------


def _times(tensor: torch.Tensor, rate: float | torch.Tensor) -> torch.Tensor:
    """Multiply by one rate for all rows, or by one per row."""
    return tensor * (rate.to(tensor.dtype) if isinstance(rate, torch.Tensor) else rate)


def _averaged(mean: torch.Tensor, new: torch.Tensor, keep: float) -> torch.Tensor:
    return mean.mul_(keep).add_(new, alpha=1 - keep)


def _sgd(w: torch.Tensor, g: torch.Tensor, slots: Tensors, steps: torch.Tensor, o: dict[str, Any]) -> None:
    step = _times(g, o["lr"])
    if not o["momentum"]:
        w.sub_(step)
        return
    (velocity,) = slots
    velocity.mul_(o["momentum"]).sub_(step)
    if o["nesterov"]:
        w.sub_(step).add_(velocity, alpha=o["momentum"])
    else:
        w.add_(velocity)


def _adagrad(w: torch.Tensor, g: torch.Tensor, slots: Tensors, steps: torch.Tensor, o: dict[str, Any]) -> None:
    (total,) = slots
    total.addcmul_(g, g)
    w.sub_(_times(g, o["lr"]).div_(total.add(o["epsilon"]).sqrt_()))


def _rmsprop(w: torch.Tensor, g: torch.Tensor, slots: Tensors, steps: torch.Tensor, o: dict[str, Any]) -> None:
    square, *rest = slots
    scale = _averaged(square, g * g, o["rho"]).add(o["epsilon"])
    if o["centered"]:
        mean = _averaged(rest.pop(), g, o["rho"])
        scale.addcmul_(mean, mean, value=-1)
    step = _times(g, o["lr"]).div_(scale.sqrt_())
    if o["momentum"] > 0:
        (velocity,) = rest
        step = velocity.mul_(o["momentum"]).add_(step)
    w.sub_(step)


def _adadelta(w: torch.Tensor, g: torch.Tensor, slots: Tensors, steps: torch.Tensor, o: dict[str, Any]) -> None:
    square, moved = slots
    scale = _averaged(square, g * g, o["rho"]).add(o["epsilon"]).sqrt_()
    step = moved.add(o["epsilon"]).sqrt_().mul_(g).div_(scale)
    _averaged(moved, step * step, o["rho"])
    w.sub_(_times(step, o["lr"]))


def _adam(w: torch.Tensor, g: torch.Tensor, slots: Tensors, steps: torch.Tensor, o: dict[str, Any]) -> None:
    mean, square, *largest = slots
    _averaged(mean, g, o["beta_1"])
    _averaged(square, g * g, o["beta_2"])
    if largest:
        square = torch.maximum(largest[0], square, out=largest[0])
    made = (steps + 1).to(w.dtype)
    powers = [torch.full_like(made, o[beta]) ** made for beta in ("beta_1", "beta_2")]
    rate = _times((1 - powers[1]).sqrt_(), o["lr"]).div_(1 - powers[0])
    w.sub_((mean * rate).div_(square.sqrt().add_(o["epsilon"])))


def _of_adam(optimizer: Any) -> list[list[Any]]:
    largest = [optimizer._velocity_hats] if optimizer.amsgrad else []
    return [optimizer._momentums, optimizer._velocities, *largest]


def _of_rmsprop(optimizer: Any) -> list[list[Any]]:
    return [kept for kept in (optimizer._velocities, optimizer._momentums, optimizer._average_gradients) if kept]


ADAM = _Kind(_adam, ("beta_1", "beta_2", "epsilon"), _of_adam)
TABLE = {
    "SGD": _Kind(_sgd, ("momentum", "nesterov"), lambda o: [o.momentums] if o.momentums else []),
    "Adagrad": _Kind(_adagrad, ("epsilon",), lambda o: [o._accumulators]),
    "RMSprop": _Kind(_rmsprop, ("rho", "momentum", "epsilon", "centered"), _of_rmsprop),
    "Adadelta": _Kind(_adadelta, ("rho", "epsilon"), lambda o: [o._accumulated_grads, o._accumulated_delta_vars]),
    "Adam": ADAM,
    "AdamW": ADAM,
}
"""Optimisers by class name; Keras has a variant of each class per backend."""
