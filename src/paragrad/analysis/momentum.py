"""Implicit momentum: asynchronous descent moves, on average over many runs, as if it had momentum of 1 - 1/n.

Let c be the center and G_t the mean, over the n workers, of the loss's gradient at their anchors. With memoryless
windows whoever commits next is any of them with equal chance, so that E[c_{t+1} - c_t] = -η E[G_t]; it then takes the
new center, so that E[G_{t+1}] = (1 - 1/n) E[G_t] + (1/n) E[∇L(c_{t+1})]. Together, for any loss and plain SGD
(Mitliagkas et al., *Asynchrony begets momentum*, 2016, arXiv:1605.09774):

    E[c_{t+1} - c_t] = (1 - 1/n) E[c_t - c_{t-1}] - (η/n) E[∇L(c_t)]

``regress`` measures both factors, knowing neither n nor η. It is a law of the *mean* of many runs. In one run the
chance of who commits stands in two neighbouring updates with opposite signs, and hides it.
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
"""Runs are gathered in so many groups; the errors come from leaving out one group after another."""
SINGULAR = 1e10
"""The condition number from which on a path does not tell momentum and gradient apart."""

AT_ONCE = 128
"""Points of a path whose gradients are taken together."""


# -- a quadratic, many runs at once ---------------------------------------------------------------------------------


def walk(
    start: torch.Tensor, order: Iterable[torch.Tensor], *, workers: int, rate: float, curvature: torch.Tensor
) -> Iterator[torch.Tensor]:
    """The center of DOWNPOUR with windows of one step on f(x) = ½ Σ hⱼ xⱼ²; each row is a run of its own.

    ``start`` is [runs, coordinates]; each tensor of ``order`` names, for each run, the worker that commits next:
    c <- c - η h a_k;  a_k <- c. Yields the start, then the center after each update.
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
    """The mean path of many runs of DOWNPOUR(1) on a quadratic, one for each group: [groups, updates + 1, coordinates].

    Windows last exponentially long, all with the same mean. Such a window is memoryless: however long it has lasted,
    what is left of it is distributed as at its start. So at any moment all n workers are equally likely to be the next
    to commit, whatever happened before, and a run needs no clock: the committing worker is drawn uniformly for each update.

    Every run starts at 1 with all anchors there. Take two or more curvatures: on a single one, plain descent (n = 1) is a
    geometric series, in which a step and a gradient are the same but for a factor. Rates near 1 / (n h) make the mean
    path swing once or twice and die out in some 8n updates, and the runs stay near it (within 0.03 to 0.16 of a start of 1).
    At fixed rates they do not: with many workers the spread of the runs grows, and drowns their mean.
    """
    _at_least("workers", workers, 1)
    _at_least("groups", groups, 2)
    _at_least("updates", updates, 4)
    if runs < groups or runs % groups:
        raise UsageError(f"runs={runs}, but they are shared out over groups={groups}: take a multiple of that.")
    if curvature.dim() != 1:
        raise UsageError(f"curvature has the shape {tuple(curvature.shape)}, but must be a list of numbers, one a coordinate.")
    generator = torch.Generator().manual_seed(seed)
    order = (torch.randint(workers, (runs,), generator=generator) for _ in range(updates))
    curvature = curvature.to(torch.float64)
    start = torch.ones(runs, len(curvature), dtype=torch.float64)
    path = walk(start, order, workers=workers, rate=rate, curvature=curvature)
    return torch.stack([center.view(groups, runs // groups, -1).mean(1) for center in path], 1)


# -- the regression -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Momentum:
    """What a regression found, each with its standard error."""

    value: float
    """μ: how much of one movement is in the next."""
    error: float
    rate: float
    """ρ: how much of the gradient is in a movement; η/n where the law holds."""
    rate_error: float


def regress(means: torch.Tensor, gradients: torch.Tensor, *, lagged: bool = True) -> Momentum:
    """Fit x_{t+1} - x_t = μ (x_t - x_{t-1}) - ρ g_t over all updates and coordinates; neither μ nor ρ is given.

    ``means`` and ``gradients`` are [groups, updates, coordinates]: the mean path of each group of runs, and the mean of the
    full gradient at its points (on a quadratic: curvature times path). The fit is on the mean over all groups; the
    errors are from leaving out one group after another (jackknife).

    Plain least squares (``lagged=False``) reads too little, by an amount that shrinks with the number of runs:
    x_t - x_{t-1} holds the chance of who committed then, and so does the residual, with the opposite sign. The movement
    and gradient one update *earlier* do not know that chance; as instruments (``lagged=True``) they remove the bias.
    """
    if means.dim() != 3 or means.shape != gradients.shape:
        raise UsageError(
            f"Paths of the shape {tuple(means.shape)} and gradients of the shape {tuple(gradients.shape)} do not fit: "
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
    """The implicit momentum of repeated runs of any model: ``paths`` and ``gradients`` are [run, update, parameter].

    ``paths`` are the centers of runs that start at the same point and differ in who commits when (and in their
    mini-batches); ``gradients`` those of the *full* training loss at these very points (``gradients_along``). The law
    holds for any loss with plain SGD and memoryless windows, so this is the same regression, with instruments, since a few
    dozen or hundred runs are all one can afford of a network. Take the first 8n updates or so: later ones add noise and
    nothing else. Runs whose windows are not memoryless have another law (equal workers in turn have a constant delay,
    and no such momentum).
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
    """The gradient of the loss over all these rows at every point of ``paths`` [..., parameter], in the same shape.

    A point holds the module's parameters as a center does: one after another, in the module's order. The module must be
    of one type, as ``module.double()`` is, and is left as it is.
    """
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    ends = list(accumulate((shape.numel() for shape in shapes.values()), initial=0))
    if paths.shape[-1] != ends[-1]:
        raise UsageError(
            f"paths has {paths.shape[-1]} parameters in a point, but the module has {ends[-1]}: give the module of the runs."
        )

    def value(point: torch.Tensor) -> torch.Tensor:
        places = zip(shapes.items(), pairwise(ends), strict=True)
        state = {name: point[lo:hi].view(shape) for (name, shape), (lo, hi) in places}
        return loss(functional_call(module, state, (inputs,)), target)

    points, gradient = paths.flatten(0, -2), vmap(grad(value))
    some = [gradient(points[first : first + AT_ONCE]) for first in range(0, len(points), AT_ONCE)]
    return torch.cat(some).view_as(paths)


def _fit(path: torch.Tensor, gradients: torch.Tensor, *, lagged: bool) -> torch.Tensor:
    """(μ, ρ) of one path [updates, coordinates]."""
    movement = path.diff(dim=0)
    causes = torch.stack([movement[:-1], -gradients[1:-1]], -1)  # at t: the last movement, and the gradient here
    effects = movement[1:]
    instruments = causes
    if lagged:
        instruments, causes, effects = causes[:-1], causes[1:], effects[1:]
    instruments, causes, effects = instruments.flatten(0, 1), causes.flatten(0, 1), effects.flatten()
    matrix = instruments.T @ causes
    scale = matrix.abs().amax(0).clamp_min(torch.finfo(matrix.dtype).tiny)
    if not bool(torch.isfinite(matrix).all()) or float(torch.linalg.cond(matrix / scale)) > SINGULAR:
        raise UsageError(
            "The path does not tell momentum and gradient apart: it did not move, diverged, or is a geometric series. "
            "Take two or more curvatures, a path that swings, or another rate."
        )
    found: torch.Tensor = torch.linalg.solve(matrix, instruments.T @ effects)
    return found


# -- the other estimator --------------------------------------------------------------------------------------------


def yellowfin(path: torch.Tensor, gradients: torch.Tensor, *, rate: float) -> torch.Tensor:
    """YellowFin's estimate of momentum at each update, from one path: [updates - 2].

    μ̂ = median over coordinates of (x_t - x_{t-1} + α ∇f(x_{t-1})) / (x_{t-1} - x_{t-2})   (Zhang, Mitliagkas 2017)

    **It is circular as evidence.** It must be told α, how much of the gradient is in a step. That is known of a
    synchronous run, which it may steer. But who claims n asynchronous workers puts in α = η/n, and gets about 1 - 1/n
    back from anything that steps by η along the gradient: plain SGD of one process reads 0.865 when it is told that it
    is 8. To measure implicit momentum, take ``regress``, which is told neither n nor η.

    ``path`` and ``gradients`` are [updates, coordinates]. Coordinates that stood still are left out.
    """
    if path.dim() != 2 or path.shape != gradients.shape or len(path) < 3:
        raise UsageError(
            f"A path of the shape {tuple(path.shape)} and gradients of the shape {tuple(gradients.shape)} do not fit: "
            "both must be [updates, coordinates], with 3 updates or more."
        )
    movement = path.diff(dim=0)
    ratio = (movement[1:] + rate * gradients[1:-1]) / movement[:-1]
    return torch.where(movement[:-1] == 0, torch.nan, ratio).nanmedian(1).values


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{name}: {value}, but there must be at least {least}.")
