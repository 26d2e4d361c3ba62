"""Settings of a run besides the training: its directory, checkpoints, validation and early stopping."""

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
    """A callback that reads the center itself. It receives the center before training begins."""

    def watch(self, center: Any) -> None:
        """Receive the center of the run."""


Callback: TypeAlias = Callable[[Event], bool | None]
"""Called with every event of the record; True asks the run to stop cleanly."""


LABEL, DIRICHLET = "label", "dirichlet"
PARTITIONS = ("auto", "dealt", "stolen", LABEL, DIRICHLET)
"""Ways to distribute rows among the workers."""
ALPHA = 0.5


def partition_of(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the fields of a ``Run.partition``; raise if it is not valid."""
    if not isinstance(text, str):
        raise UsageError(f"partition={text!r} is not a string. Available: {', '.join(PARTITIONS)}.")
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
            raise UsageError(f"alpha={alpha} in partition={text!r} must be a number above 0.")
    return name, fields


@dataclass(frozen=True)
class Stop:
    """Conditions that end a run before its last epoch. The first one that holds ends it."""

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
            raise UsageError(f"patience={self.patience} must be at least 1: it counts validations without a lower loss.")

    @property
    def looks(self) -> bool:
        """True if a condition needs validation."""
        return any(value is not None for value in (self.accuracy, self.loss, self.patience))


@dataclass(frozen=True)
class Run:
    """Directory, checkpoints, validation and callbacks of a run."""

    out: str | Path | None = None
    """The run directory; by default ``runs/<date>-<time>-<scheme>``."""
    resume: bool | Literal["auto"] = False
    """Continue from the newest valid checkpoint in ``out``; ``auto`` starts a new run if there is none."""
    checkpoint_every: float | None = 60.0
    """Seconds between checkpoints; None: only at the end, on a signal, and when the run is stopped."""
    validate_every: str | int | None = "epoch"
    """When to validate the center. ``"epoch"``: at the start and after each epoch, and up to ten times within epochs of
    100,000 rows and more. ``"5s"``: every 5 seconds. 200: every 200 updates of the center. None: only at the end."""
    keep: Literal["best", "last"] | None = None
    """Weights of the result: those with the lowest validation loss, or those after the last update. None: the best if
    ``stop.patience`` is set, else the last."""
    partition: str = "auto"
    """How mini-batches are distributed. ``dealt``: each worker gets its own in advance. ``stolen``: a worker takes the next
    free one. ``auto``: dealt if workers wait for each other; stolen if they do not, or if late work is dropped and repeated.
    ``label``: dealt, with rows sorted by label, so that workers see different classes (the worst case of heterogeneous
    data). ``dirichlet:alpha=0.5``: dealt, with each worker's class shares drawn from a Dirichlet distribution; the smaller
    alpha, the more workers differ."""
    distances: bool = False
    """True: the record also holds how far the center moved between two replies to a worker. It costs one pass over the
    weights per commit."""
    stop: Stop = field(default_factory=Stop)
    callbacks: tuple[Callback, ...] = ()
    spelled: Mapping[str, Any] = field(default_factory=dict)
    """Data, model and loss as the command line gave them, so that run.toml can repeat the run."""

    @classmethod
    def of(cls, given: Run | str | Path | None) -> Run:
        """Return a Run from a Run, from the path of its directory, or from None (all defaults)."""
        if isinstance(given, cls):
            return given
        if given is None or isinstance(given, str | Path):
            return cls(out=given)
        raise UsageError(f"run={given!r} is neither a pg.Run, such as pg.Run(out='runs/x'), nor the path of a run directory.")

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None and self.checkpoint_every <= 0:
            raise UsageError(f"checkpoint_every={self.checkpoint_every} must be a number of seconds above 0.")
        validates = unit_of(self.validate_every) is not None
        if self.keep not in (None, "best", "last"):
            raise UsageError(f"keep={self.keep!r} must be 'best' or 'last' (none: best if there is a patience, else last).")
        partition_of(self.partition)
        if not isinstance(self.stop, Stop):
            raise UsageError(
                f"stop={self.stop!r} is not a pg.Stop, such as pg.Stop(seconds=600). To stop by a function, give a callback: a "
                "run stops when a callback returns True."
            )
        if not isinstance(self.callbacks, tuple | list) or not all(map(callable, self.callbacks)):
            raise UsageError(f"callbacks={self.callbacks!r} must be a tuple of functions, even for one function: (f,).")
        if not validates and (self.stop.looks or self.keep == "best"):
            needs = "keep='best'" if self.keep == "best" else "A target or patience"
            raise UsageError(f"{needs} needs validation during the run, but validate_every is None: give 'epoch', '5s' or 200.")

    @property
    def keeps_best(self) -> bool:
        """True if the best weights are the result."""
        return self.keep == "best" or (self.keep is None and self.stop.patience is not None)
