"""Optimisers of many replicas at once: one row per replica in weights, gradients and state, each with its own step count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Tensors: TypeAlias = list[torch.Tensor]
Update: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Tensors, torch.Tensor, dict[str, Any]], None]
"""(weights, gradient, slots, earlier steps, options): all but the options have one row per replica."""


@dataclass(frozen=True)
class RowOptimizer:
    """Update rule and options of an optimiser for rows."""

    update: Update
    options: dict[str, Any]
    slots: tuple[float | torch.Tensor, ...]
    """Initial value of each state vector: one number, or one per weight."""
    fused: str | None = None
    """Name of torch's fused kernel for many tensors, if there is one."""
    made: int = 0
    """Number of steps already in the initial state."""
    names: tuple[str, ...] = ()
    """torch's names for the state vectors."""
    counts: bool = True
    """True if torch keeps the number of steps in the state."""

    @property
    def lr(self) -> float:
        """Learning rate."""
        return float(self.options["lr"])

    @property
    def plain(self) -> bool:
        """True if a step is exactly ``w - lr * gradient``."""
        o = self.options
        return self.update is _sgd and not (o["momentum"] or o["weight_decay"] or o["maximize"])

    def step(
        self,
        weights: torch.Tensor,
        gradient: torch.Tensor,
        slots: Tensors,
        steps: torch.Tensor,
        rates: torch.Tensor | None = None,
    ) -> None:
        """Make one step of every row, in place.

        ``steps`` has the shape (rows, 1, ...); with a schedule, ``rates`` are the learning rates of the rows. Neither changes.
        """
        if self.options.get("maximize"):
            gradient = gradient.neg()
        options = self.options if rates is None else {**self.options, "lr": rates}
        self.update(weights, gradient, slots, steps, options)


def rows_of(optimizer: torch.optim.Optimizer) -> RowOptimizer | None:
    """Return the same optimiser for rows; None if its kind is unknown, or if it has several groups of parameters."""
    kind = type(optimizer)
    if kind not in TABLE or len(optimizer.param_groups) != 1:
        return None
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    if isinstance(options["lr"], torch.Tensor):
        return None
    update, names_of = TABLE[kind]
    names, fused = names_of(options), None
    if update is _adam:
        options["decoupled_weight_decay"] = kind is torch.optim.AdamW or options.get("decoupled_weight_decay", False)
        if not options["amsgrad"]:
            fused = "_fused_adamw_" if options["decoupled_weight_decay"] else "_fused_adam_"
    start = float(options.get("initial_accumulator_value", 0.0))
    return RowOptimizer(update, options, (start,) * len(names), fused, names=names, counts=update is not _sgd)


# -- the update rules of torch ------------------------------------------------------------------------------------------


def _decayed(weights: torch.Tensor, gradient: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    return gradient.add(weights, alpha=options["weight_decay"]) if options["weight_decay"] else gradient


def _descend(weights: torch.Tensor, step: torch.Tensor, rate: float | torch.Tensor) -> None:
    """Subtract ``rate * step`` from the weights, with one rate for all rows or one per row."""
    if isinstance(rate, torch.Tensor):
        weights.sub_(step * rate.to(step.dtype))
    else:
        weights.sub_(step, alpha=rate)


def _sgd(w: torch.Tensor, g: torch.Tensor, slots: Tensors, steps: torch.Tensor, o: dict[str, Any]) -> None:
    g = _decayed(w, g, o)
    if o["momentum"]:
        (velocity,) = slots
        share = 1 - o["dampening"]
        # A row's first step takes the whole gradient, whatever the dampening.
        new = g if share == 1 else g * (share + (steps == 0).double() * o["dampening"]).to(g.dtype)
        velocity.mul_(o["momentum"]).add_(new)
        g = g.add(velocity, alpha=o["momentum"]) if o["nesterov"] else velocity
    _descend(w, g, o["lr"])


def _adagrad(w: torch.Tensor, g: torch.Tensor, slots: Tensors, steps: torch.Tensor, o: dict[str, Any]) -> None:
    g = _decayed(w, g, o)
    (total,) = slots
    total.addcmul_(g, g)
    step = g / total.sqrt().add_(o["eps"])
    if o["lr_decay"]:
        w.sub_(step * (o["lr"] / (1 + steps.double() * o["lr_decay"])).to(g.dtype))
    else:
        _descend(w, step, o["lr"])


def _rmsprop(w: torch.Tensor, g: torch.Tensor, slots: Tensors, steps: torch.Tensor, o: dict[str, Any]) -> None:
    g = _decayed(w, g, o)
    square, *rest = slots
    square.mul_(o["alpha"]).addcmul_(g, g, value=1 - o["alpha"])
    if o["centered"]:
        mean = rest.pop(0)
        mean.lerp_(g, 1 - o["alpha"])
        scale = square.addcmul(mean, mean, value=-1).sqrt_().add_(o["eps"])
    else:
        scale = square.sqrt().add_(o["eps"])
    if o["momentum"]:
        (velocity,) = rest
        velocity.mul_(o["momentum"]).addcdiv_(g, scale)
        _descend(w, velocity, o["lr"])
    elif isinstance(o["lr"], torch.Tensor):
        _descend(w, g / scale, o["lr"])
    else:
        w.addcdiv_(g, scale, value=-o["lr"])


def _adadelta(w: torch.Tensor, g: torch.Tensor, slots: Tensors, steps: torch.Tensor, o: dict[str, Any]) -> None:
    g = _decayed(w, g, o)
    square, moved = slots
    square.mul_(o["rho"]).addcmul_(g, g, value=1 - o["rho"])
    step = moved.add(o["eps"]).sqrt_().div_(square.add(o["eps"]).sqrt_()).mul_(g)
    moved.mul_(o["rho"]).addcmul_(step, step, value=1 - o["rho"])
    _descend(w, step, o["lr"])


def _adam(w: torch.Tensor, g: torch.Tensor, slots: Tensors, steps: torch.Tensor, o: dict[str, Any]) -> None:
    if o["decoupled_weight_decay"]:
        if o["weight_decay"]:
            left = 1 - o["lr"] * o["weight_decay"]
            w.mul_(left.to(w.dtype) if isinstance(left, torch.Tensor) else left)
    else:
        g = _decayed(w, g, o)
    mean, square, *largest = slots
    beta1, beta2 = o["betas"]
    mean.lerp_(g, 1 - beta1)
    square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    made = (steps + 1).double()
    if largest:
        torch.maximum(largest[0], square, out=largest[0])
        square = largest[0]
    scale = square.sqrt().mul_((1 - beta2**made).rsqrt().to(w.dtype)).add_(o["eps"])
    w.sub_((mean / scale).mul_((o["lr"] / (1 - beta1**made)).to(w.dtype)))


def _rmsprop_names(o: dict[str, Any]) -> tuple[str, ...]:
    return ("square_avg", *("grad_avg",) * bool(o["centered"]), *("momentum_buffer",) * bool(o["momentum"]))


def _adam_names(o: dict[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *("max_exp_avg_sq",) * bool(o["amsgrad"]))


TABLE: dict[type[torch.optim.Optimizer], tuple[Update, Callable[[dict[str, Any]], tuple[str, ...]]]] = {
    torch.optim.SGD: (_sgd, lambda o: ("momentum_buffer",) * bool(o["momentum"])),
    torch.optim.Adagrad: (_adagrad, lambda o: ("sum",)),
    torch.optim.RMSprop: (_rmsprop, _rmsprop_names),
    torch.optim.Adadelta: (_adadelta, lambda o: ("square_avg", "acc_delta")),
    torch.optim.Adam: (_adam, _adam_names),
    torch.optim.AdamW: (_adam, _adam_names),
}
"""Update rule of each optimiser, and torch's names for its state vectors, which depend on the options."""
