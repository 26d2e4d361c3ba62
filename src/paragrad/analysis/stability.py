"""The edge of stability of asynchronous descent with n equal workers in turn: above it, oscillations grow.

Equal workers that take turns have no implicit momentum but a constant delay: a commit is a gradient n - 1 updates old.
On a quadratic of curvature h DOWNPOUR(1) is then c_{t+1} = c_t - ηh c_{t-n+1}, which converges iff ηh < 2 sin(π/(4n - 2)).
"""

from __future__ import annotations

import math

import torch

from paragrad.errors import UsageError

DOUBLINGS = 40
"""2 to this power updates are computed before a recursion that neither grows nor decays counts as on the edge."""
LARGE = 1e12


def edge(workers: int) -> float:
    """Return the ηh (learning rate times curvature) up to which n equal workers in turn converge: 2 sin(π/(4n - 2))."""
    _check(workers)
    return 2 * math.sin(math.pi / (4 * workers - 2))


def grows(workers: int, product: float) -> bool:
    """Return whether c_{t+1} = c_t - ηh c_{t-n+1} grows without bound, for ηh = ``product``.

    The last n centers are the state of the recursion, and an update is a matrix. Its square is two updates, so that a few dozen
    squares reveal even a growth of 1e-9 per update.
    """
    _check(workers)
    update = torch.diag(torch.ones(workers - 1, dtype=torch.float64), -1)
    update[0, 0] += 1.0
    update[0, -1] -= product
    for _ in range(DOUBLINGS):
        size = float(update.abs().max())
        if not 1 / LARGE < size < LARGE:
            return size >= LARGE
        update = update @ update
    return float(update.abs().max()) > 1


def find_edge(workers: int, *, tolerance: float = 1e-6) -> float:
    """Return ``edge`` by bisection on the recursion itself."""
    if not 0 < tolerance < 1:
        raise UsageError(f"tolerance={tolerance}, but it must be between 0 and 1.")
    stable, unstable = 0.0, 4.0
    while unstable - stable > tolerance:
        middle = 0.5 * (stable + unstable)
        if grows(workers, middle):
            unstable = middle
        else:
            stable = middle
    return 0.5 * (stable + unstable)


def _check(workers: int) -> None:
    if workers < 1:
        raise UsageError(f"workers={workers}, but there must be at least 1.")
