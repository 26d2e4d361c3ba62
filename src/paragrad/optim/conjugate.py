"""Non-linear conjugate gradients, which torch lacks: each direction preserves the progress of the earlier ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch

from paragrad.errors import UsageError
from paragrad.optim.linesearch import Point, search

Beta = Literal["fletcher-reeves", "hestenes-stiefel", "polak-ribiere"]

POWELL = 0.2
"""Restart threshold: largest ratio of |g·g'| to g·g for consecutive gradients that still count as conjugate."""


class ConjugateGradient(torch.optim.Optimizer):
    """d <- -g + β d;  w <- w + α d, with α from a line search on the strong Wolfe conditions.

    ``beta`` is β: ``"fletcher-reeves"`` (g·g / g'·g', with g' the gradient before), ``"hestenes-stiefel"`` (g·y / d·y,
    with y = g - g') or ``"polak-ribiere"`` (max(0, g·y / g'·g'), that is Polak-Ribière+). The direction is -g again after
    ``restart`` steps (by default as many as there are parameters), if gradients are no longer conjugate (Powell 1977), or
    if the direction would not descend. Nocedal and Wright, *Numerical Optimization* (2006), chapters 3 and 5.

    The line search evaluates the loss at several points, so ``step`` needs a closure that computes the loss and its
    gradient again. Under ``pg.train`` this is the loss *of the current mini-batch*: the step minimises the loss of that
    mini-batch. So use large mini-batches with nearly equal losses. With small ones the search is an expensive way to follow
    noise, and directions that are conjugate for one mini-batch are not for the next, so the method restarts. There is no
    learning rate: ``first`` is only the length of the very first trial.
    """

    def __init__(
        self,
        params: Iterable[Any],
        beta: Beta = "polak-ribiere",
        *,
        restart: int | None = None,
        curvature: float = 0.1,
        evaluations: int = 25,
        first: float = 1.0,
    ) -> None:
        if beta not in get_args(Beta):
            raise UsageError(f"beta={beta!r}, but it must be one of {', '.join(get_args(Beta))}.")
        if restart is not None and restart < 1:
            raise UsageError(f"restart={restart}, but it must be at least 1 step.")
        if not 1e-4 < curvature < 0.5:
            raise UsageError(f"curvature={curvature}, but the line search needs 0.0001 < curvature < 0.5, such as 0.1.")
        if evaluations < 3:
            raise UsageError(f"evaluations={evaluations}, but a line search needs at least 3.")
        if not first > 0:
            raise UsageError(f"first={first}, but the first trial's length must be above 0.")
        super().__init__(
            params, {"beta": beta, "restart": restart, "curvature": curvature, "evaluations": evaluations, "first": first}
        )
        if len(self.param_groups) != 1:
            raise UsageError(
                f"ConjugateGradient was given {len(self.param_groups)} groups of parameters, but it searches along one line "
                "for all of them: give one group."
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Search along one direction; return the loss at the start."""
        group = self.param_groups[0]
        parameters: list[torch.Tensor] = group["params"]
        state: dict[str, Any] = self.state[parameters[0]]
        state.setdefault("steps", 0)
        state.setdefault("evaluations", 0)

        def evaluate() -> tuple[Any, torch.Tensor]:
            state["evaluations"] += 1
            with torch.enable_grad():
                loss = closure()
            return loss, _gathered(parameters)

        loss, gradient = evaluate()
        value, square = _number(loss), _dot(gradient, gradient)
        if not (math.isfinite(value) and math.isfinite(square)):
            # A search is impossible, and NaN makes the failure visible: schemes refuse such weights.
            for parameter in parameters:
                parameter.fill_(math.nan)
            self.state.clear()
            return loss
        if square == 0.0:
            return loss
        direction, fresh = self._direction(state, group, gradient, square)
        slope = _dot(gradient, direction)
        start = Point(0.0, value, slope)
        origin = [parameter.clone() for parameter in parameters]

        def at(length: float) -> Point:
            _move(parameters, origin, direction, length)
            loss_here, gradient_here = evaluate()
            return Point(length, _number(loss_here), _dot(gradient_here, direction))

        noise = 8 * torch.finfo(gradient.dtype).eps * abs(value)
        trial = _first_trial(state, group["first"], slope, square)
        end, found = search(at, start, trial, curvature=group["curvature"], noise=noise, most=group["evaluations"])
        _move(parameters, origin, direction, end.length)
        state["steps"] += 1
        if found:
            state |= {"gradient": gradient, "direction": direction, "length": end.length, "slope": slope}
            state["kept"] = 1 if fresh else state["kept"] + 1
        else:
            for key in ("gradient", "direction", "length", "slope", "kept"):
                state.pop(key, None)
        return loss

    def _direction(
        self, state: dict[str, Any], group: dict[str, Any], gradient: torch.Tensor, square: float
    ) -> tuple[torch.Tensor, bool]:
        """Return the direction, and whether it is plain steepest descent."""
        steepest = gradient.neg()
        if "direction" not in state or state["kept"] >= (group["restart"] or gradient.numel()):
            return steepest, True
        before, last = state["gradient"], state["direction"]
        if abs(_dot(gradient, before)) > POWELL * square:
            return steepest, True
        share = _beta(group["beta"], gradient, before, last)
        direction = steepest.add_(last, alpha=share)
        # Rounding, or a line search that ended early, may turn the direction uphill; NaN is not a descent either.
        if not _dot(gradient, direction) < -1e-10 * math.sqrt(square * _dot(direction, direction)):
            return gradient.neg(), True
        return direction, False


def _beta(formula: Beta, gradient: torch.Tensor, before: torch.Tensor, direction: torch.Tensor) -> float:
    """Return the share of the last direction in the next one."""
    change = gradient - before
    if formula == "fletcher-reeves":
        over, under = _dot(gradient, gradient), _dot(before, before)
    elif formula == "hestenes-stiefel":
        over, under = _dot(gradient, change), _dot(direction, change)
    else:
        over, under = max(0.0, _dot(gradient, change)), _dot(before, before)
    return over / under if under > 0 else 0.0


def _first_trial(state: dict[str, Any], first: float, slope: float, square: float) -> float:
    """Return the first trial length, which promises the same gain as the last step; ``first`` sets it at the start."""
    if "length" in state and slope:
        return float(state["length"] * min(max(state["slope"] / slope, 1e-3), 1e3))
    return first / max(1.0, math.sqrt(square))


def _number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)


def _gathered(parameters: list[torch.Tensor]) -> torch.Tensor:
    pieces = [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.detach().reshape(-1) for p in parameters]
    return torch.cat(pieces)


def _move(parameters: list[torch.Tensor], origin: list[torch.Tensor], direction: torch.Tensor, length: float) -> None:
    """Set all parameters to ``origin + length * direction``."""
    lo = 0
    for parameter, here in zip(parameters, origin, strict=True):
        hi = lo + parameter.numel()
        torch.add(here, direction[lo:hi].view_as(parameter), alpha=length, out=parameter)
        lo = hi


def _dot(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the scalar product in double precision, because conjugacy depends on the last digits."""
    return float(torch.dot(one.double(), other.double()))
