"""The user's choice of an optimiser, a learning-rate schedule and gradient clipping."""

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
"""A name with fields (``"adam:lr=0.001"``), a factory that takes the parameters, or one that takes the ``model``."""

SETTINGS = ("optimizer", "schedule", "clip_norm", "clip_value")
"""Keys of a run.toml that describe the choice."""


@dataclass(frozen=True)
class Optimizer:
    """An optimiser with a learning-rate schedule and with gradient clipping.

    The schedule follows the *global* progress: the share of the run's mini-batches that the center has applied, plus the
    worker's own steps since the last reply. So it does not depend on the number or the speed of the workers, and a resumed
    run continues where it stopped. Gradients are clipped before the optimiser uses them: each worker's gradient, or, if the
    center holds the optimiser (SyncSGD), the mean of the round, which is the gradient of the large batch.
    """

    optimizer: Factory = "adam"
    """A name (``"adam:lr=0.001"``), a factory that takes the parameters, or one that takes the ``model``."""
    schedule: ScheduleLike | None = None
    """``"cosine"``, ``"cosine:warmup=0.05,floor=0.1"``, ``"linear"``, ``"step:at=0.5+0.75,factor=0.1"``,
    ``"exponential:floor=0.01"``, ``"warmup"``; or a function from the completed share of the run to a factor."""
    clip_norm: float | None = None
    """The largest norm of a gradient: a longer one is scaled down to it (``torch.nn.utils.clip_grad_norm_``)."""
    clip_value: float | None = None
    """The largest absolute value in a gradient: larger ones are set to it (``torch.nn.utils.clip_grad_value_``)."""

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, Optimizer):
            raise UsageError("pg.Optimizer was given another pg.Optimizer: give a name or a factory.")
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
        """Return a choice as it is; a name or a factory with default schedule and clipping."""
        return given if isinstance(given, cls) else cls(given)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Optimizer:
        """Make a choice from the settings of a run.toml or the command line."""
        return cls(**{key: settings[key] for key in SETTINGS if settings.get(key) is not None})

    @cached_property
    def _schedule(self) -> Callable[[float], float]:
        assert self.schedule is not None
        return schedules.build(self.schedule)

    def factor(self, progress: float) -> float:
        """Return the factor of the learning rate at this share of the run."""
        return 1.0 if self.schedule is None else schedules.checked(self._schedule, progress)

    @property
    def clips(self) -> bool:
        """True if gradients are clipped."""
        return self.clip_norm is not None or self.clip_value is not None

    def clip(self, parameters: Iterable[torch.Tensor]) -> None:
        """Clip the gradients of these parameters, in place."""
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
        """Return the settings for a run.toml."""
        return {
            "optimizer": spelling(self.optimizer),
            "schedule": spelling(self.schedule),
            "clip_norm": self.clip_norm,
            "clip_value": self.clip_value,
        }


def spelling(thing: Any) -> str | None:
    """Return a text as it is, and the name of an object that was made in Python."""
    if thing is None or isinstance(thing, str):
        return thing
    return f"python:{getattr(thing, '__name__', type(thing).__name__)}"
