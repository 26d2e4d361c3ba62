"""The values that travel between rooms: vectors, commits, replies, events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

Vector: TypeAlias = torch.Tensor
"""A contiguous 1-D tensor: all the trained parameters of one model, one after another."""

Batches: TypeAlias = tuple[int, ...]
"""Positions in the stream of mini-batches of a run: position p is batch p % K of epoch p // K."""

Path: TypeAlias = tuple[float, ...]
"""A point in the space of a small model's parameters."""


@dataclass(slots=True)
class Commit:
    """What one worker's window has to say to the center."""

    worker: int
    sequence: int
    version: int
    """The clock that the window *began* from; never that of a fresh pull."""
    value: Vector
    steps: int
    incarnation: int = 0
    also: Mapping[str, Vector] = field(default_factory=dict)
    """Further vectors that the scheme declares in ``sends``."""
    buffers: Vector | None = None
    integers: Vector | None = None
    weight: float = 1.0
    """The loss's own normaliser, summed over the window: rows, or the sum of class weights."""
    rows: int = 0
    """Rows that the window used."""
    batches: Batches = ()
    loss: float = float("nan")
    """Mean over the window."""
    lr: float = 0.0
    """The learner's rate at the end of the window; NaN where its optimiser has none."""
    seconds: float = 0.0
    """How long the window took."""
    part: int = 0
    """Which fragment of the vector it is, where there are several."""
    pulls: tuple[int, ...] = ()
    """The clocks of the centers that were pulled while it was made."""
    saw: int = 0
    """The clock of the answer that was read before it: as a rule ``version``, but not where steps were made meanwhile."""
    distance: float = float("nan")
    """How far the center had moved between the worker's last two answers; NaN where that is not measured."""
    path: tuple[Path, Path] | None = None
    """Where the window began and where it ended, for models of so few parameters that they can be drawn."""
    coded: Mapping[str, torch.Tensor] | None = None
    """The value as it goes over a wire, where a codec has made it shorter; ``value`` is what the center decodes."""
    coded_bytes: int | None = None
    """What that weighs; None where there is no codec."""
    residual: Vector | None = None
    """What the codec leaves for the worker's next commit, once this one is applied."""
    staleness: int = 0
    """Updates of the center between the window's beginning and now; stamped by the center."""
    arrived: int = 0
    """The number of this arrival at the center: of commits, and of workers that joined or left; stamped by the center."""

    @property
    def bytes(self) -> int:
        """What its vectors weigh on a wire: as they are coded, or plain."""
        if self.coded_bytes is not None:
            return self.coded_bytes
        return sum(v.numel() * v.element_size() for v in (self.value, *self.also.values()))

    def copied(self) -> Commit:
        """The same, in memory of its own."""
        also = {name: vector.clone() for name, vector in self.also.items()}
        buffers, integers, residual = (None if v is None else v.clone() for v in (self.buffers, self.integers, self.residual))
        return replace(self, value=self.value.clone(), also=also, buffers=buffers, integers=integers, residual=residual)


@dataclass(slots=True)
class Reply:
    """What the center answers to a commit, or to a worker that joins."""

    worker: int
    sequence: int
    version: int
    """The clock of the center that is answered with."""
    value: Vector
    """The worker's to keep until its next commit is answered; it must not be written to."""
    steps: int = 0
    """The length of the next window."""
    batches: Batches = ()
    """Newly leased mini-batches."""
    applied: bool = True
    """False: the commit was refused or dropped, and ``value`` is the center to begin again from."""
    placed: bool = False
    """The worker's weights hold the answer already."""
    done: bool = False
    """No rows are left for this worker."""
    last: int = 0
    """The sequence of the worker's last applied commit; a newcomer counts on from there."""
    progress: float = 0.0
    """Share of the run's rows that have been used, for learning-rate schedules."""
    residual: Vector | None = None
    """To a worker that joins: what a codec has left out of the commits that were made in its place so far."""
    buffers: Vector | None = None
    integers: Vector | None = None

    def with_own_buffers(self) -> Reply:
        """The same, to be read later: the center goes on with its own."""
        buffers, integers = (None if v is None else v.clone() for v in (self.buffers, self.integers))
        return replace(self, buffers=buffers, integers=integers)


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

    def add(self, other: Done) -> None:
        """Another piece of the same window."""
        self.steps += other.steps
        self.rows += other.rows
        self.weight += other.weight
        self.loss += other.loss
        self.seconds += other.seconds
        self.lr, self.moved, self.busy = other.lr, other.moved, other.busy


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
