"""What belongs to a run and not to the training: where it is written, when it is looked at, when it stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from paragrad.config.options import parse_fields
from paragrad.errors import UsageError, unknown
from paragrad.rundir.grid import unit_of
from paragrad.types import Event


@runtime_checkable
class Watches(Protocol):
    """A callback that looks at the center itself, which it is handed before the training begins."""

    def watch(self, center: Any) -> None:
        """This is the center of the run."""


Callback: TypeAlias = Callable[[Event], bool | None]
"""Called with every event of the record; True asks the run to stop cleanly."""


LABEL, DIRICHLET = "label", "dirichlet"
PARTITIONS = ("auto", "dealt", "stolen", LABEL, DIRICHLET)
"""How rows are shared out among the workers."""
ALPHA = 0.5


def partition_of(text: str) -> tuple[str, dict[str, Any]]:
    """What ``Run.partition`` asks for, and its fields; raises where that cannot be."""
    if not isinstance(text, str):
        raise UsageError(f"partition={text!r}, but it is one of {', '.join(PARTITIONS)}, as text.")
    name, fields = parse_fields(text)
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    known = ["alpha"] if name == DIRICHLET else []
    for key in fields:
        if key not in known:
            raise unknown(f"field of partition {name!r}:", key, known)
    if name == DIRICHLET:
        alpha = fields.setdefault("alpha", ALPHA)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < float("inf"):
            raise UsageError(f"alpha={alpha} in partition={text!r}, but it is a number above 0.")
    return name, fields


@dataclass(frozen=True)
class Stop:
    """When a run ends before its last epoch: the first condition that holds."""

    seconds: float | None = None
    """Wall-clock seconds after the start barrier."""
    accuracy: float | None = None
    """Stop once validation reaches this accuracy."""
    loss: float | None = None
    """Stop once validation reaches this loss."""
    patience: int | None = None
    """Stop after this many validations in a row without a lower loss."""

    def __post_init__(self) -> None:
        if self.seconds is not None and self.seconds <= 0:
            raise UsageError(f"max seconds is {self.seconds}, but it must be above 0.")
        if self.patience is not None and self.patience < 1:
            raise UsageError(f"patience={self.patience}, but at least 1 validation must be allowed to be no better.")

    @property
    def looks(self) -> bool:
        """Whether it needs validation."""
        return any(value is not None for value in (self.accuracy, self.loss, self.patience))


@dataclass(frozen=True)
class Run:
    """The run's directory and rhythm."""

    out: str | Path | None = None
    """The run directory; by default ``runs/<date>-<time>-<scheme>``."""
    resume: bool | Literal["auto"] = False
    """Go on from the newest sound checkpoint in ``out``; ``auto`` begins anew where there is none."""
    checkpoint_every: float | None = 60.0
    """Seconds between checkpoints; None writes one only at the end, on a signal, and when the run is stopped."""
    validate_every: str | int | None = "epoch"
    """When the center is validated: ``"epoch"`` at the start and at the end of each epoch (in epochs of 100,000 rows and
    more up to ten times on the way), ``"5s"`` every 5 seconds, 200 every 200 updates of the center; None: only at the end."""
    keep: Literal["best", "last"] | None = None
    """Which weights are the result: those of the validation with the lowest loss, or those after the last update; None: the
    best where ``stop.patience`` is set, else the last."""
    partition: str = "auto"
    """Whether batches are ``dealt`` to workers beforehand or ``stolen``, taken by whoever is ready; auto: dealt where
    workers wait for each other, stolen where they do not, or where late work is dropped and done again. ``label``: dealt,
    each worker with rows of its own, sorted by label, the worst case of data that are not alike; ``dirichlet:alpha=0.5``:
    dealt, each worker's shares of the classes drawn from a Dirichlet distribution, the less alike the smaller alpha is."""
    distances: bool = False
    """Whether the record tells how far the center moved between each worker's answers, besides how often; it costs a
    pass over the weights for each commit."""
    stop: Stop = field(default_factory=Stop)
    callbacks: tuple[Callback, ...] = ()
    spelled: Mapping[str, Any] = field(default_factory=dict)
    """How the command line spelled data, model and loss, so that run.toml can repeat the run."""

    @classmethod
    def of(cls, given: Run | str | Path | None) -> Run:
        """A run from itself or from the path of its directory; None: one with all defaults."""
        if isinstance(given, cls):
            return given
        if given is None or isinstance(given, str | Path):
            return cls(out=given)
        raise UsageError(f"run={given!r} is neither a pg.Run, such as pg.Run(out='runs/x'), nor the path of a run directory.")

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None and self.checkpoint_every <= 0:
            raise UsageError(f"checkpoint_every={self.checkpoint_every}, but it is a number of seconds above 0.")
        looks = unit_of(self.validate_every) is not None
        if self.keep not in (None, "best", "last"):
            raise UsageError(f"keep={self.keep!r}, but it is 'best' or 'last' (none: best where there is a patience).")
        partition_of(self.partition)
        if not isinstance(self.stop, Stop):
            raise UsageError(
                f"stop={self.stop!r} is no pg.Stop, such as pg.Stop(seconds=600). What a function decides is a callback: one "
                "that returns True stops the run."
            )
        if not isinstance(self.callbacks, tuple | list) or not all(map(callable, self.callbacks)):
            raise UsageError(f"callbacks={self.callbacks!r}, but it is a tuple of functions, also where there is one: (f,).")
        if not looks and (self.stop.looks or self.keep == "best"):
            needs = "keep='best'" if self.keep == "best" else "A target or patience"
            raise UsageError(f"{needs} needs validations on the way, but validate_every is None: give 'epoch', '5s' or 200.")

    @property
    def keeps_best(self) -> bool:
        """Whether the best weights are the result."""
        return self.keep == "best" or (self.keep is None and self.stop.patience is not None)
