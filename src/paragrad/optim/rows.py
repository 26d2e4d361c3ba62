"""Optimisers of many replicas at once: a row each of weights, gradients and state, every row at a step of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Tensors: TypeAlias = list[torch.Tensor]
Update: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Tensors, torch.Tensor, dict[str, Any]], None]
"""(weights, gradient, slots, steps made before this one, options): all but the options have a row for each replica."""


@dataclass(frozen=True)
class RowOptimizer:
    """An optimiser's rule and options, for rows."""

    update: Update
    options: dict[str, Any]
    slots: tuple[float | torch.Tensor, ...]
    """What each vector of its state begins with: one number, or one for each weight."""
    fused: str | None = None
    """The name of torch's own kernel for many tensors at once, where there is one that fits."""
    made: int = 0
    """Steps that its state has behind it at the beginning."""
    names: tuple[str, ...] = ()
    """torch's names for the vectors of its state."""
    counts: bool = True
    """Whether torch keeps the number of steps with them."""

    @property
    def lr(self) -> float:
        """The learning rate."""
        return float(self.options["lr"])

    @property
    def plain(self) -> bool:
        """Whether a step is ``w - lr * gradient`` and no more."""
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
        """One step of every row, in place; ``steps`` has the shape (rows, 1, ...) and is not changed, nor are ``rates``,
        each row's own where there is a schedule."""
        if self.options.get("maximize"):
            gradient = gradient.neg()
        options = self.options if rates is None else {**self.options, "lr": rates}
        self.update(weights, gradient, slots, steps, options)


def rows_of(optimizer: torch.optim.Optimizer) -> RowOptimizer | None:
    """The same for rows; None for one that is not known here, or that has several groups of parameters."""
    made = TABLE.get(type(optimizer))
    if made is None or len(optimizer.param_groups) != 1:
        return None
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    if isinstance(group["lr"], torch.Tensor):
        return None
    return made(group)


# -- the rules, as torch writes them ------------------------------------------------------------------------------------


def _decayed(weights: torch.Tensor, gradient: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    return gradient.add(weights, alpha=options["weight_decay"]) if options["weight_decay"] else gradient


def _descend(weights: torch.Tensor, step: torch.Tensor, rate: float | torch.Tensor) -> None:
    """``weights - rate * step``, with one rate for all rows or one for each."""
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


def _of_sgd(o: dict[str, Any]) -> RowOptimizer:
    return RowOptimizer(_sgd, o, (0.0,) if o["momentum"] else (), names=("momentum_buffer",), counts=False)


def _of_adagrad(o: dict[str, Any]) -> RowOptimizer:
    return RowOptimizer(_adagrad, o, (float(o["initial_accumulator_value"]),), names=("sum",))


def _of_rmsprop(o: dict[str, Any]) -> RowOptimizer:
    names = ("square_avg", *("grad_avg",) * bool(o["centered"]), *("momentum_buffer",) * bool(o["momentum"]))
    return RowOptimizer(_rmsprop, o, (0.0,) * len(names), names=names)


def _of_adadelta(o: dict[str, Any]) -> RowOptimizer:
    return RowOptimizer(_adadelta, o, (0.0, 0.0), names=("square_avg", "acc_delta"))


def _of_adam(o: dict[str, Any]) -> RowOptimizer:
    o = {"decoupled_weight_decay": False, **o}
    fused = None if o["amsgrad"] else ("_fused_adamw_" if o["decoupled_weight_decay"] else "_fused_adam_")
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    return RowOptimizer(_adam, o, (0.0,) * (2 + bool(o["amsgrad"])), fused, names=names)


def _of_adamw(o: dict[str, Any]) -> RowOptimizer:
    return _of_adam({**o, "decoupled_weight_decay": True})


TABLE: dict[type[torch.optim.Optimizer], Callable[[dict[str, Any]], RowOptimizer]] = {
    torch.optim.SGD: _of_sgd,
    torch.optim.Adagrad: _of_adagrad,
    torch.optim.RMSprop: _of_rmsprop,
    torch.optim.Adadelta: _of_adadelta,
    torch.optim.Adam: _of_adam,
    torch.optim.AdamW: _of_adamw,
}
