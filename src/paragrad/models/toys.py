"""Toy problems: functions of a few numbers with a known minimum, as models without data; their path can be plotted.

A row of data is noise: a vector of standard normal numbers, one per parameter. The output for a row is
``f(w) + noise * (row @ w)``. So the mean over a batch has the gradient ``∇f(w) + noise * mean(row)``: that of the function
plus noise of a known size. A row of zeros gives the function itself.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn

from paragrad.config.options import parse_fields
from paragrad.errors import UsageError, unknown

LOSS = "value"
"""Loss of a toy problem: the mean of its output."""


class Toy(nn.Module):
    """A function f of a few numbers. ``point`` are its parameters; at ``minimum`` f is smallest, and 0."""

    fields: ClassVar[tuple[str, ...]] = ("start", "noise")
    """Arguments by name, also on the command line."""
    minimum: tuple[float, ...]
    default_start: tuple[float, ...]

    def __init__(self, *, start: Any = None, noise: Any = 0.0) -> None:
        super().__init__()
        self.start = _numbers("start", self.default_start if start is None else start)
        if len(self.start) != len(self.minimum):
            raise UsageError(
                f"start={self.start} has {len(self.start)} numbers, but {type(self).__name__} has {self.size} parameters: give "
                f"one number per parameter, such as {self.default_start}."
            )
        if not _is_number(noise) or not 0 <= noise < math.inf:
            raise UsageError(
                f"noise={noise!r}, but it must be the standard deviation of the gradient's noise: 0 or more, such as 0.1."
            )
        self.noise = float(noise)
        self.point = nn.Parameter(torch.tensor(self.start, dtype=torch.float32))

    @property
    def size(self) -> int:
        """Number of parameters, and of numbers in a row of noise."""
        return len(self.minimum)

    def value(self, point: torch.Tensor) -> torch.Tensor:
        """Return f at one or many points; the last dimension holds the coordinates."""
        raise NotImplementedError

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return f at the parameters for each row of noise, plus the noise term."""
        if rows.ndim != 2 or rows.shape[-1] != self.size:
            raise UsageError(
                f"{type(self).__name__} has {self.size} parameters, but the rows have the shape {tuple(rows.shape[1:])}. A toy "
                "problem is trained on noise: use data='noise'."
            )
        return self.value(self.point) + self.noise * (rows @ self.point)

    def reset_parameters(self) -> None:
        """Draw a random point around the start, for schemes whose workers start from different points."""
        with torch.no_grad():
            self.point.copy_(torch.tensor(self.start) + 0.5 * torch.randn(self.size))

    def spelled(self) -> str:
        """Return the text from which ``build`` makes an equal problem."""
        return f"{type(self).__name__.lower()}:" + ",".join(f"{name}={getattr(self, name)!r}" for name in self.fields)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.fields)


class Booth(Toy):
    """(x + 2y - 7)² + (2x + y - 5)²: a tilted bowl, nine times as steep across as along; its minimum is (1, 3)."""

    minimum, default_start = (1.0, 3.0), (-4.0, -2.0)

    def value(self, point: torch.Tensor) -> torch.Tensor:
        x, y = point[..., 0], point[..., 1]
        return (x + 2 * y - 7) ** 2 + (2 * x + y - 5) ** 2


class Beale(Toy):
    """(1.5 - x + xy)² + (2.25 - x + xy²)² + (2.625 - x + xy³)²: flat except for steep walls; its minimum is (3, 0.5)."""

    minimum, default_start = (3.0, 0.5), (1.0, -1.0)

    def value(self, point: torch.Tensor) -> torch.Tensor:
        x, y = point[..., 0], point[..., 1]
        return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


class Rosenbrock(Toy):
    """(1 - x)² + 100 (y - x²)²: a narrow valley with a bend, easy to find and slow to follow; its minimum is (1, 1)."""

    minimum, default_start = (1.0, 1.0), (-1.2, 1.0)

    def value(self, point: torch.Tensor) -> torch.Tensor:
        x, y = point[..., 0], point[..., 1]
        return (1 - x) ** 2 + 100 * (y - x**2) ** 2


class Quadratic(Toy):
    """½ Σ hⱼ wⱼ²: a bowl with the curvatures h that you choose, one per parameter; its minimum is 0."""

    fields: ClassVar[tuple[str, ...]] = ("curvatures", "start", "noise")

    def __init__(self, curvatures: Any = (1.0, 10.0), *, start: Any = None, noise: Any = 0.0) -> None:
        chosen = _numbers("curvatures", curvatures)
        if min(chosen) <= 0:
            raise UsageError(f"curvatures={chosen}, but each must be above 0, or the function has no minimum.")
        self.minimum, self.default_start = (0.0,) * len(chosen), (1.0,) * len(chosen)
        super().__init__(start=start, noise=noise)
        self.curvatures = chosen
        # Not a buffer: workers would send it with every commit.
        self._half = [0.5 * curvature for curvature in chosen]

    def value(self, point: torch.Tensor) -> torch.Tensor:
        return (point.new_tensor(self._half) * point**2).sum(-1)


TABLE: dict[str, type[Toy]] = {kind.__name__.lower(): kind for kind in (Booth, Beale, Rosenbrock, Quadratic)}
"""Toy problems by name on the command line."""

CATALOGUE: dict[str, str] = {
    "booth": "toy problem: a tilted bowl in two dimensions; booth:start=(-4,-2),noise=0.1",
    "beale": "toy problem: a plain between steep walls, in two dimensions; beale:start=(1,-1),noise=0.1",
    "rosenbrock": "toy problem: a narrow bent valley in two dimensions; rosenbrock:start=(-1.2,1),noise=0.1",
    "quadratic": "toy problem: a bowl with these curvatures, one per dimension; quadratic:curvatures=(1,10),noise=0.1",
}
"""Toy problems with a one-line description. They need no data."""


def is_toy(spec: str) -> bool:
    """Return whether a model's text names a toy problem."""
    return spec.partition(":")[0].strip().lower() in TABLE


def build(spec: str) -> Toy:
    """Build the toy problem that a text names, such as ``quadratic:curvatures=(1,10),noise=0.1``."""
    name, given = parse_fields(spec)
    if name.lower() not in TABLE:
        raise unknown("toy problem", name, TABLE)
    kind = TABLE[name.lower()]
    for key in given:
        if key not in kind.fields:
            raise unknown(f"field of model {name!r}:", key, kind.fields)
    return kind(**given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(name: str, given: Any) -> tuple[float, ...]:
    values = (given,) if _is_number(given) else given
    if not isinstance(values, tuple | list) or not values or not all(_is_number(v) and math.isfinite(v) for v in values):
        raise UsageError(f"{name}={given!r}, but it must be one finite number per parameter, such as {name}=(1,10).")
    return tuple(float(value) for value in values)
