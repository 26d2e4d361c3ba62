"""The values that travel between rooms: vectors, commits, replies, events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol, TypeAlias, runtime_checkable

import torch

from paragrad.core.layout import LARGEST, Layout, figure, flag, fold, is_absent, never, points, real, rounded, whole, wholes

Vector: TypeAlias = torch.Tensor
"""A contiguous 1-D tensor: all the trained parameters of one model, one after another."""

Batches: TypeAlias = tuple[int, ...]
"""Positions in the stream of mini-batches of a run: position p is batch p % K of epoch p // K."""

WorkerState: TypeAlias = Mapping[str, torch.Tensor]
"""What a worker keeps to itself from window to window, by name: its optimiser's state, the scheme's slots, its counters."""

Path: TypeAlias = tuple[float, ...]
"""A point in the space of a small model's parameters."""


@dataclass(frozen=True, slots=True)
class SchemePlan:
    """A run before it begins, as a scheme sees it: enough to warn of what is known to go wrong."""

    workers: int = 1
    steps: float = math.inf
    """Local steps of each worker in the whole run, on average."""
    optimizer: str | None = None
    """The optimiser's name in lower case, as ``adam``; None: a function of the user's own, or unknown."""

    def rounds(self, window: int) -> float:
        """Commits of each worker in the whole run, with windows of so many steps."""
        return self.steps / window


@dataclass(slots=True)
class Commit:
    """What one worker's window sends to the center. core/layout.py says how the fields with a kind travel."""

    worker: Annotated[int, whole(omits=never)]
    sequence: Annotated[int, whole(least=1, omits=never)]
    version: Annotated[int, whole(omits=never)]
    """Clock of the center that the window *began* from; never that of a later pull."""
    value: Vector
    steps: Annotated[int, whole(least=1, omits=never)]
    incarnation: Annotated[int, whole(omits=never)] = 0
    also: Mapping[str, Vector] = field(default_factory=dict)
    """Further vectors, which the scheme declares in ``sends``."""
    buffers: Vector | None = None
    integers: Vector | None = None
    weight: Annotated[float, real(least=-1e300)] = 1.0
    """The loss's own normaliser, summed over the window: rows, or the sum of class weights."""
    rows: Annotated[int, whole(omits=never)] = 0
    """Rows that the window used."""
    batches: Annotated[Batches, wholes(omits=never, shown=fold)] = ()
    loss: Annotated[float, real(omits=never, shown=rounded)] = float("nan")
    """Mean over the window."""
    lr: Annotated[float, real(omits=never, shown=figure)] = 0.0
    """The learner's rate at the end of the window; NaN where its optimiser has none."""
    seconds: Annotated[float, real(least=0.0, omits=never)] = 0.0
    """Duration of the window. The record has all digits: what a scheme makes of workers' speeds can then be repeated."""
    part: Annotated[int, whole()] = 0
    """Number of the fragment of the vector, where there are several."""
    pulls: Annotated[tuple[int, ...], wholes(omits=is_absent)] = ()
    """Clocks of the centers that were pulled while the commit was made."""
    saw: Annotated[int, whole(omits=lambda saw, commit: saw == commit.version)] = 0
    """Clock of the answer that was read before it: as a rule ``version``, but not where steps were made meanwhile."""
    gradient_norm: Annotated[float, real(omits=never, shown=figure)] = float("nan")
    """Norm of the gradient of the window's last step, or of the gradient that is committed; NaN where it is not measured."""
    distance: Annotated[float, real(omits=is_absent, shown=figure)] = float("nan")
    """Distance that the center moved between the worker's last two answers; NaN where it is not measured."""
    path: Annotated[tuple[Path, Path] | None, points()] = None
    """First and last point of the window, for models of so few parameters that they can be drawn."""
    coded: Mapping[str, torch.Tensor] | None = None
    """The value as a codec encodes it for a wire; ``value`` is what the center decodes."""
    bytes: Annotated[int | None, whole(optional=True, omits=is_absent, stamped=True)] = None
    """Bytes of the encoded vectors; None without a codec."""
    residual: Vector | None = None
    """What the codec leaves for the worker's next commit, once this one is applied."""
    state: WorkerState | None = None
    """The worker's private state after this window; only where a checkpoint is due, else None."""
    staleness: Annotated[int, whole(omits=never, stamped=True)] = 0
    """Updates of the center between the window's beginning and now; set by the center."""
    arrived: Annotated[int, whole(omits=never, stamped=True)] = 0
    """Number of this arrival at the center, among commits and workers that join or leave; set by the center."""

    def copied(self) -> Commit:
        """Return the same in memory of its own."""
        also = {name: vector.clone() for name, vector in self.also.items()}
        buffers, integers, residual = (None if v is None else v.clone() for v in (self.buffers, self.integers, self.residual))
        return replace(self, value=self.value.clone(), also=also, buffers=buffers, integers=integers, residual=residual)


@dataclass(slots=True)
class Reply:
    """What the center answers to a commit, or to a worker that joins."""

    worker: Annotated[int, whole()]
    sequence: Annotated[int, whole(least=-LARGEST)]
    """Of the commit; below 0: -1 - incarnation of the worker that joins."""
    version: Annotated[int, whole()]
    """Clock of the center that is answered with."""
    value: Vector
    """The worker's to keep until its next commit is answered; it must not be written to."""
    steps: Annotated[int, whole()] = 0
    """Length of the next window."""
    batches: Annotated[Batches, wholes()] = ()
    """Newly leased mini-batches."""
    applied: Annotated[bool, flag()] = True
    """False: the commit was rejected, and ``value`` is the center to begin again from."""
    placed: Annotated[bool, flag()] = False
    """The worker's weights hold the answer already."""
    done: Annotated[bool, flag()] = False
    """No rows are left for this worker."""
    last: Annotated[int, whole()] = 0
    """Sequence of the worker's last applied commit; a newcomer continues from there."""
    progress: Annotated[float, real(least=0.0)] = 0.0
    """Share of the run's rows that have been used, for learning-rate schedules."""
    residual: Vector | None = None
    """For a worker that joins: what a codec has left out of the commits of its rank so far."""
    state: WorkerState | None = None
    """For a worker that joins after a resume: the private state of its predecessor at the last applied commit."""
    buffers: Vector | None = None
    integers: Vector | None = None

    def with_own_buffers(self) -> Reply:
        """Return the same, to be read later: the center goes on with its own buffers."""
        buffers, integers = (None if v is None else v.clone() for v in (self.buffers, self.integers))
        return replace(self, buffers=buffers, integers=integers)


COMMIT, REPLY = Layout(Commit), Layout(Reply)
"""Layouts of what travels."""


@dataclass(slots=True)
class Done:
    """What a window did."""

    steps: int = 0
    rows: int = 0
    weight: float = 0.0
    loss: float = 0.0
    """Summed over the window, each step weighted by its normaliser."""
    seconds: float = 0.0
    lr: float = 0.0
    moved: float = 0.0
    busy: bool = False
    gradient_norm: float = float("nan")

    def add(self, other: Done) -> None:
        """Another piece of the same window."""
        self.steps += other.steps
        self.rows += other.rows
        self.weight += other.weight
        self.loss += other.loss
        self.seconds += other.seconds
        self.lr, self.moved, self.busy, self.gradient_norm = other.lr, other.moved, other.busy, other.gradient_norm


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the record: what happened, and how many seconds after the start barrier."""

    kind: str
    time: float
    data: Mapping[str, Any] = field(default_factory=dict)


class CenterView(Protocol):
    """The center as a scheme sees it inside ``apply``: the *next* state, which it may change in place."""

    @property
    def workers(self) -> int:
        """How many workers the run was asked for."""

    @property
    def clock(self) -> int:
        """Updates applied so far."""

    @property
    def live(self) -> int:
        """Workers that are there now."""

    @property
    def working(self) -> Sequence[int]:
        """Ranks of the workers that are there and have rows left."""

    @property
    def value(self) -> Vector:
        """The central variable."""

    @value.setter
    def value(self, new: Vector) -> None: ...

    @property
    def slots(self) -> Mapping[str, Vector]:
        """The vectors that the scheme declared in ``center_slots``."""

    @property
    def handed(self) -> Sequence[Vector]:
        """What each worker was last given; only for schemes that say ``remembers``."""

    @property
    def speeds(self) -> Sequence[float]:
        """Local steps a second of each worker, 0 where none has been seen."""

    @property
    def counts(self) -> Sequence[int]:
        """Commits applied of each worker."""

    def add(self, vector: Vector, scale: float = 1.0) -> None:
        """``value += scale * vector`` in one pass over memory."""

    def approach(self, vector: Vector, share: float) -> Vector:
        """``e = share * (vector - value); value += e`` in one pass; returns e."""

    def mean(self, commits: Sequence[Commit]) -> Vector:
        """The mean of the commits' values, weighted by their ``weight``; to be used before the next is asked for."""

    def step(self, gradient: Vector, scale: float = 1.0) -> None:
        """One step of the user's optimiser on the value, its rate scaled."""


class VectorOptimizer(Protocol):
    """An optimiser of the center's value, for schemes that ship gradients."""

    def step(self, vector: Vector, gradient: Vector, scale: float = 1.0) -> None:
        """One step, in place, with the learning rate scaled."""

    def state(self) -> dict[str, torch.Tensor]:
        """Its state as named tensors."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of ``state``."""


@runtime_checkable
class Paced(Protocol):
    """A learner, or an optimiser of the center, whose learning rate goes by the progress of the run."""

    def set_progress(self, progress: float) -> None:
        """Take the rate for this share of the run's mini-batches, 0 to 1; asked before each step."""
