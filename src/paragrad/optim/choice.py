"""What a user chooses as the optimiser: which one, how its rate goes by the progress of the run, how gradients are clipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch

from paragrad.errors import UsageError
from paragrad.optim import schedules
from paragrad.optim.schedules import ScheduleLike

Factory: TypeAlias = str | Callable[..., torch.optim.Optimizer]
"""A name with fields (``"adam:lr=0.001"``), or a factory that takes the parameters, or one that takes the ``model``."""

SETTINGS = ("optimizer", "schedule", "clip_norm", "clip_value")
"""What a run.toml says of it, by name."""


@dataclass(frozen=True)
class Optimizer:
    """An optimiser with a learning-rate schedule and with gradient clipping.

    The schedule goes by *global* progress: the share of the run's mini-batches that the center has applied, and the
    worker's own steps since it was told. So it does not depend on how many workers there are or on who is fast, and a
    resumed run goes on where it was. Clipping comes before the optimiser sees the gradient: the worker's own, or, where the
    center holds the optimiser (SyncSGD), the mean of the round, which is that of the large batch.
    """

    optimizer: Factory = "adam"
    """A name (``"adam:lr=0.001"``), a factory that takes the parameters, or one that takes the ``model``."""
    schedule: ScheduleLike | None = None
    """``"cosine"``, ``"cosine:warmup=0.05,floor=0.1"``, ``"linear"``, ``"step:at=0.5+0.75,factor=0.1"``,
    ``"exponential:floor=0.01"``, ``"warmup"``; or a function from the share of the run that is done to a factor."""
    clip_norm: float | None = None
    """The largest norm of a gradient: a longer one is scaled down to it (``torch.nn.utils.clip_grad_norm_``)."""
    clip_value: float | None = None
    """The largest absolute value in a gradient: larger ones are set to it (``torch.nn.utils.clip_grad_value_``)."""

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, Optimizer):
            raise UsageError("pg.Optimizer was given another pg.Optimizer: give a name, or a factory.")
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not value > 0 or not math.isfinite(value)):
                raise UsageError(f"{name}={value!r}, but gradients are clipped to a number above 0, such as 1.0.")
        if self.clip_norm is not None and self.clip_value is not None:
            raise UsageError(f"clip_norm={self.clip_norm} and clip_value={self.clip_value}: give one of them.")
        if self.schedule is not None:
            for progress in (0.0, 0.5, 1.0):
                self.factor(progress)

    @classmethod
    def of(cls, given: Any) -> Optimizer:
        """The same with its defaults, where only a name or a factory was given."""
        return given if isinstance(given, cls) else cls(given)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Optimizer:
        """As a run.toml or the command line says it."""
        return cls(**{key: settings[key] for key in SETTINGS if settings.get(key) is not None})

    @cached_property
    def _schedule(self) -> Callable[[float], float]:
        assert self.schedule is not None
        return schedules.build(self.schedule)

    def factor(self, progress: float) -> float:
        """What the rate is multiplied with when so much of the run is done."""
        return 1.0 if self.schedule is None else schedules.checked(self._schedule, progress)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.clip_norm is not None or self.clip_value is not None

    def clip(self, parameters: Iterable[torch.Tensor]) -> None:
        """Clip the gradients of these, in place."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        if self.clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self.clip_value)

    def clip_rows(self, gradient: torch.Tensor) -> None:
        """Clip a gradient in each row, in place."""
        if self.clip_norm is not None:
            norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_((self.clip_norm / (norms + 1e-6)).clamp_(max=1.0))
        if self.clip_value is not None:
            gradient.clamp_(-self.clip_value, self.clip_value)

    def spelled(self) -> dict[str, Any]:
        """What a run.toml says of it."""
        return {
            "optimizer": spelling(self.optimizer),
            "schedule": spelling(self.schedule),
            "clip_norm": self.clip_norm,
            "clip_value": self.clip_value,
        }


def spelling(thing: Any) -> str | None:
    """A text as it is; of what was made in Python, its name."""
    if thing is None or isinstance(thing, str):
        return thing
    return f"python:{getattr(thing, '__name__', type(thing).__name__)}"
