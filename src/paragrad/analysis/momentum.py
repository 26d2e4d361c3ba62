"""Implicit momentum: asynchronous descent moves, on average over many runs, as if it had momentum of 1 - 1/n.

Let c be the center and G_t the mean, over the n workers, of the gradient of the loss at their anchors. With memoryless windows
all workers are equally likely to commit next, so that E[c_{t+1} - c_t] = -η E[G_t]. That worker then takes the new center, so
that E[G_{t+1}] = (1 - 1/n) E[G_t] + (1/n) E[∇L(c_{t+1})]. Together, for any loss and plain SGD (Mitliagkas et al., *Asynchrony
begets momentum*, 2016, arXiv:1605.09774):

    E[c_{t+1} - c_t] = (1 - 1/n) E[c_t - c_{t-1}] - (η/n) E[∇L(c_t)]

``regress`` measures both factors without n and η. It is a law of the *mean* of many runs. In a single run, the random choice of
the committing worker enters two neighbouring updates with opposite signs, and hides the law.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from paragrad.errors import UsageError
from paragrad.learners.criterion import Loss

GROUPS = 20
"""Number of groups of runs; standard errors come from leaving out one group at a time."""
SINGULAR = 1e10
"""Condition number above which momentum and gradient cannot be distinguished in a path."""

AT_ONCE = 128
"""Points of a path whose gradients are computed together."""


# -- a quadratic, many runs at once ---------------------------------------------------------------------------------


def walk(
    start: torch.Tensor, order: Iterable[torch.Tensor], *, workers: int, rate: float, curvature: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Yield the start and then the center after each update of DOWNPOUR(1) on f(x) = ½ Σ hⱼ xⱼ²; each row is one run.

    ``start`` is [runs, coordinates]. Each tensor of ``order`` holds, for each run, the worker that commits next:
    c <- c - η h a_k;  a_k <- c.
    """
    center, runs = start, torch.arange(len(start))
    anchors = start.expand(workers, *start.shape).clone()
    yield center
    for committing in order:
        center = center - rate * curvature * anchors[committing, runs]
        anchors[committing, runs] = center
        yield center


def quadratic_means(
    workers: int,
    runs: int,
    *,
    updates: int,
    rate: float,
    curvature: torch.Tensor,
    seed: int,
    groups: int = GROUPS,
) -> torch.Tensor:
    """Return the mean path of runs of DOWNPOUR(1) on a quadratic, per group: [groups, updates + 1, coordinates].

    Window lengths are exponentially distributed with the same mean, and so memoryless: all n workers are equally likely to
    commit next, whatever happened before. So the committing worker is drawn uniformly for each update, without a clock.

    Every run starts at 1, with all anchors there. Take two or more curvatures: with a single one, plain descent (n = 1) is a
    geometric series, in which step and gradient differ only by a factor. With learning rates near 1 / (n h), the mean path
    oscillates once or twice and decays in about 8n updates, and the runs stay near it (within 0.03 to 0.16 of a start of 1).
    With a fixed rate and many workers, the spread of the runs would hide their mean.
    """
    _at_least("workers", workers, 1)
    _at_least("groups", groups, 2)
    _at_least("updates", updates, 4)
    if runs < groups or runs % groups:
        raise UsageError(f"runs={runs}, but it must be a multiple of groups={groups}.")
    if curvature.dim() != 1:
        raise UsageError(f"curvature has the shape {tuple(curvature.shape)}, but must be a list: one number per coordinate.")
    generator = torch.Generator().manual_seed(seed)
    order = (torch.randint(workers, (runs,), generator=generator) for _ in range(updates))
    curvature = curvature.to(torch.float64)
    start = torch.ones(runs, len(curvature), dtype=torch.float64)
    path = walk(start, order, workers=workers, rate=rate, curvature=curvature)
    return torch.stack([center.view(groups, runs // groups, -1).mean(1) for center in path], 1)


# -- the regression -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Momentum:
    """Result of a regression, with standard errors."""

    value: float
    """μ: factor of one movement in the next."""
    error: float
    rate: float
    """ρ: factor of the gradient in a movement; η/n if the law holds."""
    rate_error: float


def regress(means: torch.Tensor, gradients: torch.Tensor, *, lagged: bool = True) -> Momentum:
    """Fit x_{t+1} - x_t = μ (x_t - x_{t-1}) - ρ g_t over all updates and coordinates.

    ``means`` and ``gradients`` are [groups, updates, coordinates]: the mean path of each group of runs, and the mean of the
    full gradient at its points (on a quadratic: curvature times path). The fit uses the mean over all groups; the errors come
    from leaving out one group at a time (jackknife).

    Plain least squares (``lagged=False``) underestimates μ, by an amount that shrinks with the number of runs: x_t - x_{t-1}
    contains the random choice of the committing worker, and so does the residual, with the opposite sign. The movement and
    gradient one update *earlier* do not depend on that choice; as instruments (``lagged=True``) they remove the bias.
    """
    if means.dim() != 3 or means.shape != gradients.shape:
        raise UsageError(
            f"Paths of shape {tuple(means.shape)} and gradients of shape {tuple(gradients.shape)} do not match: "
            "both must be [groups, updates, coordinates]."
        )
    groups, updates, _ = means.shape
    _at_least("groups", groups, 2)
    _at_least("points of the path", updates, 5)
    fits = torch.stack(
        [_fit((means.sum(0) - means[g]) / (groups - 1), (gradients.sum(0) - gradients[g]) / (groups - 1), lagged=lagged)
         for g in range(groups)]
    )  # fmt: skip
    value, rate = _fit(means.mean(0), gradients.mean(0), lagged=lagged).tolist()
    error, rate_error = ((groups - 1) * fits.var(0, correction=0)).sqrt().tolist()
    return Momentum(value, error, rate, rate_error)


def of_runs(paths: torch.Tensor, gradients: torch.Tensor, *, groups: int = GROUPS, lagged: bool = True) -> Momentum:
    """Return the implicit momentum of repeated runs of any model: ``paths`` and ``gradients`` are [run, update, parameter].

    ``paths`` are the centers of runs that start at the same point and differ in the order of commits (and in their
    mini-batches). ``gradients`` are those of the *full* training loss at these points (``gradients_along``). The law holds for
    any loss with plain SGD and memoryless windows. So this is the same regression, with instruments because there are only
    dozens or hundreds of runs of a network. Take about the first 8n updates: later ones only add noise. Runs without memoryless
    windows follow another law (equal workers in turn have a constant delay, and no such momentum).
    """
    if paths.dim() != 3:
        raise UsageError(f"paths has the shape {tuple(paths.shape)}, but must be [run, update, parameter].")
    groups = min(groups, len(paths))
    _at_least("runs", len(paths), 2)
    kept = len(paths) - len(paths) % groups

    def grouped(values: torch.Tensor) -> torch.Tensor:
        return values[:kept].to(torch.float64).view(groups, kept // groups, *values.shape[1:]).mean(1)

    return regress(grouped(paths), grouped(gradients), lagged=lagged)


def gradients_along(
    paths: torch.Tensor, module: nn.Module, loss: Loss, inputs: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the loss over all these rows at every point of ``paths`` [..., parameter], in the same shape.

    A point holds the parameters like a center: one after another, in the order of the module. The module must have a single
    dtype, as ``module.double()`` does; it is not changed.
    """
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    ends = list(accumulate((shape.numel() for shape in shapes.values()), initial=0))
    if paths.shape[-1] != ends[-1]:
        raise UsageError(
            f"paths has {paths.shape[-1]} parameters per point, but the module has {ends[-1]}: give the module of the runs."
        )

    def value(point: torch.Tensor) -> torch.Tensor:
        places = zip(shapes.items(), pairwise(ends), strict=True)
        state = {name: point[lo:hi].view(shape) for (name, shape), (lo, hi) in places}
        return loss(functional_call(module, state, (inputs,)), target)

    points, gradient = paths.flatten(0, -2), vmap(grad(value))
    some = [gradient(points[first : first + AT_ONCE]) for first in range(0, len(points), AT_ONCE)]
    return torch.cat(some).view_as(paths)


def _fit(path: torch.Tensor, gradients: torch.Tensor, *, lagged: bool) -> torch.Tensor:
    """Return (μ, ρ) of one path [updates, coordinates]."""
    movement = path.diff(dim=0)
    causes = torch.stack([movement[:-1], -gradients[1:-1]], -1)  # at t: the last movement, and the gradient
    effects = movement[1:]
    instruments = causes
    if lagged:
        instruments, causes, effects = causes[:-1], causes[1:], effects[1:]
    instruments, causes, effects = instruments.flatten(0, 1), causes.flatten(0, 1), effects.flatten()
    matrix = instruments.T @ causes
    scale = matrix.abs().amax(0).clamp_min(torch.finfo(matrix.dtype).tiny)
    if not bool(torch.isfinite(matrix).all()) or float(torch.linalg.cond(matrix / scale)) > SINGULAR:
        raise UsageError(
            "Momentum and gradient cannot be distinguished in this path: it did not move, diverged, or is a geometric series. "
            "Take two or more curvatures, an oscillating path, or another learning rate."
        )
    found: torch.Tensor = torch.linalg.solve(matrix, instruments.T @ effects)
    return found


# -- the other estimator --------------------------------------------------------------------------------------------


def yellowfin(path: torch.Tensor, gradients: torch.Tensor, *, rate: float) -> torch.Tensor:
    """Return YellowFin's estimate of momentum at each update, from one path: [updates - 2].

    μ̂ = median over coordinates of (x_t - x_{t-1} + α ∇f(x_{t-1})) / (x_{t-1} - x_{t-2})   (Zhang, Mitliagkas 2017)

    **As evidence it is circular.** It needs α, the factor of the gradient in a step. In a synchronous run α is known. But for n
    asynchronous workers one would assume α = η/n, and the estimate is then about 1 - 1/n for anything that steps by η along the
    gradient: plain SGD of one process gives 0.865 if one assumes 8 workers. To measure implicit momentum, take ``regress``,
    which needs neither n nor η.

    ``path`` and ``gradients`` are [updates, coordinates]. Coordinates that did not move are left out.
    """
    if path.dim() != 2 or path.shape != gradients.shape or len(path) < 3:
        raise UsageError(
            f"A path of shape {tuple(path.shape)} and gradients of shape {tuple(gradients.shape)} do not match: "
            "both must be [updates, coordinates], with 3 updates or more."
        )
    movement = path.diff(dim=0)
    ratio = (movement[1:] + rate * gradients[1:-1]) / movement[:-1]
    return torch.where(movement[:-1] == 0, torch.nan, ratio).nanmedian(1).values


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{name}: {value}, but there must be at least {least}.")
