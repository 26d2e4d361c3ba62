"""Values that packages pass to each other: vectors, commits, replies, events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Protocol, TypeAlias, runtime_checkable

import torch

from paragrad.core.layout import LARGEST, Layout, figure, flag, fold, is_absent, never, points, real, rounded, whole, wholes

Vector: TypeAlias = torch.Tensor
"""A contiguous 1-D tensor: all trained parameters of one model, concatenated."""

Batches: TypeAlias = tuple[int, ...]
"""Positions in the stream of mini-batches of a run: with K batches per epoch, position p is batch p % K of epoch p // K."""

WorkerState: TypeAlias = Mapping[str, torch.Tensor]
"""Private state of a worker between windows, by name: the optimiser's state, the scheme's slots, its counters."""

Path: TypeAlias = tuple[float, ...]
"""A point in the parameter space of a small model."""


@dataclass(frozen=True, slots=True)
class SchemePlan:
    """Facts about a run before it begins, from which a scheme can warn of known problems."""

    workers: int = 1
    steps: float = math.inf
    """Local steps per worker in the whole run, on average."""
    optimizer: str | None = None
    """Name of the optimiser in lower case, such as ``adam``; None for a user-defined or unknown one."""

    def rounds(self, window: int) -> float:
        """Return the commits per worker in the whole run, with windows of that many steps."""
        return self.steps / window


@dataclass(slots=True)
class Commit:
    """The message that a worker sends to the center after a window. core/layout.py encodes the annotated fields."""

    worker: Annotated[int, whole(omits=never)]
    sequence: Annotated[int, whole(least=1, omits=never)]
    version: Annotated[int, whole(omits=never)]
    """Clock of the center from which the window *began*, never that of a later pull."""
    value: Vector
    steps: Annotated[int, whole(least=1, omits=never)]
    incarnation: Annotated[int, whole(omits=never)] = 0
    also: Mapping[str, Vector] = field(default_factory=dict)
    """Further vectors, as the scheme declares them in ``sends``."""
    buffers: Vector | None = None
    integers: Vector | None = None
    weight: Annotated[float, real(least=-1e300)] = 1.0
    """Normaliser of the loss, summed over the window: rows, or the sum of class weights."""
    rows: Annotated[int, whole(omits=never)] = 0
    """Rows in the window."""
    batches: Annotated[Batches, wholes(omits=never, shown=fold)] = ()
    loss: Annotated[float, real(omits=never, shown=rounded)] = float("nan")
    """Mean loss over the window."""
    lr: Annotated[float, real(omits=never, shown=figure)] = 0.0
    """Learning rate at the end of the window; NaN if the optimiser has none."""
    seconds: Annotated[float, real(least=0.0, omits=never)] = 0.0
    """Duration of the window. The record keeps all digits, so that a replay can repeat what a scheme derives from speeds."""
    part: Annotated[int, whole()] = 0
    """Index of the fragment of the vector, for schemes that send it in fragments."""
    pulls: Annotated[tuple[int, ...], wholes(omits=is_absent)] = ()
    """Clocks of the centers that the worker pulled during the window."""
    saw: Annotated[int, whole(omits=lambda saw, commit: saw == commit.version)] = 0
    """Clock of the last reply read before the commit; later than ``version`` if the worker made steps meanwhile."""
    gradient_norm: Annotated[float, real(omits=never, shown=figure)] = float("nan")
    """Norm of the gradient of the last step, or of the committed gradient; NaN if not measured."""
    distance: Annotated[float, real(omits=is_absent, shown=figure)] = float("nan")
    """Distance that the center moved between the last two replies to the worker; NaN if not measured."""
    path: Annotated[tuple[Path, Path] | None, points()] = None
    """First and last point of the window, for models small enough to be drawn."""
    coded: Mapping[str, torch.Tensor] | None = None
    """The value as the codec encodes it; ``value`` is the decoded vector."""
    bytes: Annotated[int | None, whole(optional=True, omits=is_absent, stamped=True)] = None
    """Bytes of the encoded vectors; None without a codec."""
    residual: Vector | None = None
    """Remainder that the codec adds to the worker's next commit, once this commit is applied."""
    state: WorkerState | None = None
    """The worker's private state after this window, if a checkpoint is due; else None."""
    staleness: Annotated[int, whole(omits=never, stamped=True)] = 0
    """Updates of the center since the window began; set by the center."""
    arrived: Annotated[int, whole(omits=never, stamped=True)] = 0
    """Sequence number among all arrivals at the center (commits, joins, leaves); set by the center."""

    def copied(self) -> Commit:
        """Return a copy that shares no memory with this commit."""
        also = {name: vector.clone() for name, vector in self.also.items()}
        buffers, integers, residual = (None if v is None else v.clone() for v in (self.buffers, self.integers, self.residual))
        return replace(self, value=self.value.clone(), also=also, buffers=buffers, integers=integers, residual=residual)


@dataclass(slots=True)
class Reply:
    """The center's reply to a commit, or to a worker that joins."""

    worker: Annotated[int, whole()]
    sequence: Annotated[int, whole(least=-LARGEST)]
    """Sequence number of the commit; for a worker that joins: -1 - incarnation."""
    version: Annotated[int, whole()]
    """Clock of the center in ``value``."""
    value: Vector
    """Read-only vector, valid until the worker's next commit is answered."""
    steps: Annotated[int, whole()] = 0
    """Length of the next window."""
    batches: Annotated[Batches, wholes()] = ()
    """Newly leased mini-batches."""
    applied: Annotated[bool, flag()] = True
    """False if the commit was rejected: the worker restarts from ``value``."""
    placed: Annotated[bool, flag()] = False
    """True if the worker's weights already hold the reply."""
    done: Annotated[bool, flag()] = False
    """True if no rows are left for this worker."""
    last: Annotated[int, whole()] = 0
    """Sequence number of the worker's last applied commit; a worker that joins continues from there."""
    progress: Annotated[float, real(least=0.0)] = 0.0
    """Share of the run's rows already used, for learning-rate schedules."""
    residual: Vector | None = None
    """For a worker that joins: the part of its rank's earlier commits that the codec has not sent yet."""
    state: WorkerState | None = None
    """For a worker that joins after a resume: its predecessor's private state at the last applied commit."""
    buffers: Vector | None = None
    integers: Vector | None = None

    def with_own_buffers(self) -> Reply:
        """Return a copy whose buffers stay as they are while the center changes its own."""
        buffers, integers = (None if v is None else v.clone() for v in (self.buffers, self.integers))
        return replace(self, buffers=buffers, integers=integers)


COMMIT, REPLY = Layout(Commit), Layout(Reply)
"""Encodings of the two messages."""


@dataclass(slots=True)
class Done:
    """Totals of a window, or of a piece of it."""

    steps: int = 0
    rows: int = 0
    weight: float = 0.0
    loss: float = 0.0
    """Sum over the window, each step weighted by its normaliser."""
    seconds: float = 0.0
    lr: float = 0.0
    moved: float = 0.0
    busy: bool = False
    gradient_norm: float = float("nan")

    def add(self, other: Done) -> None:
        """Add the next piece of the same window."""
        self.steps += other.steps
        self.rows += other.rows
        self.weight += other.weight
        self.loss += other.loss
        self.seconds += other.seconds
        self.lr, self.moved, self.busy, self.gradient_norm = other.lr, other.moved, other.busy, other.gradient_norm


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the record; ``time`` is in seconds after the start barrier."""

    kind: str
    time: float
    data: Mapping[str, Any] = field(default_factory=dict)


class CenterView(Protocol):
    """The center as ``Scheme.apply`` sees it: the *next* state, which the scheme may change in place."""

    @property
    def workers(self) -> int:
        """Number of workers that the run was started with."""

    @property
    def clock(self) -> int:
        """Updates applied so far."""

    @property
    def live(self) -> int:
        """Number of connected workers."""

    @property
    def working(self) -> Sequence[int]:
        """Ranks of the connected workers that have rows left."""

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
        """Last vector sent to each worker; only for schemes whose ``answers`` is "remembered"."""

    @property
    def speeds(self) -> Sequence[float]:
        """Local steps per second of each worker; 0 before its first commit."""

    @property
    def counts(self) -> Sequence[int]:
        """Applied commits of each worker."""

    def add(self, vector: Vector, scale: float = 1.0) -> None:
        """Compute ``value += scale * vector`` in one pass over memory."""

    def approach(self, vector: Vector, share: float) -> Vector:
        """Compute ``e = share * (vector - value); value += e`` in one pass; return e."""

    def mean(self, commits: Sequence[Commit]) -> Vector:
        """Return the mean of the commits' values, weighted by ``weight``. The next call overwrites it."""

    def step(self, gradient: Vector, scale: float = 1.0) -> None:
        """Make one step of the user's optimiser on the value, with the learning rate scaled."""


class VectorOptimizer(Protocol):
    """Optimiser of the center's value, for schemes that send gradients."""

    def step(self, vector: Vector, gradient: Vector, scale: float = 1.0) -> None:
        """Make one step in place, with the learning rate scaled."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state as named tensors."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a state that ``state`` returned."""


@runtime_checkable
class Paced(Protocol):
    """Learner or center optimiser whose learning rate depends on the progress of the run."""

    def set_progress(self, progress: float) -> None:
        """Set the learning rate for this share of the run's mini-batches, 0 to 1; called before each step."""
