"""One worker's vectors and counters, as a scheme sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping

import torch

from paragrad.codecs.feedback import Feedback
from paragrad.core import kernels
from paragrad.errors import UsageError
from paragrad.types import Reply, Vector, WorkerState

OPTIMIZER, SLOT, COUNTERS = "optimizer.", "slot.", "counters"
"""Names in a worker's state: prefix of the learner's tensors, prefix of the scheme's slots, and the counters."""

MEASURED = 5
"""Smallest number of local steps between two measurements of the gradient's norm."""


class Slots(MutableMapping[str, Vector]):
    """Named vectors of fixed length. Assignment copies the values: the memory of a slot never changes."""

    def __init__(self, vectors: dict[str, Vector]) -> None:
        self._vectors = vectors

    def __getitem__(self, name: str) -> Vector:
        try:
            return self._vectors[name]
        except KeyError:
            known = ", ".join(map(repr, self._vectors)) or "none"
            raise UsageError(
                f"The scheme uses the slot {name!r}, but has declared {known}: add it to center_slots or worker_slots."
            ) from None

    def __setitem__(self, name: str, value: Vector) -> None:
        if value is not self._vectors[name]:
            self._vectors[name].copy_(value)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"Slot {name!r} is declared by the scheme and cannot be removed.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._vectors)

    def __len__(self) -> int:
        return len(self._vectors)


class Replica:
    """``me`` in a scheme. The anchor, the adopted weights and the last received center are three different vectors.

    ``local``   the current weights (assignment copies into the model)
    ``anchor``  the weights at the beginning of this window
    ``center``  the center as last received
    ``at_send`` the weights when the last commit left, if a window was computed since; otherwise None
    ``sent``    the value of the last commit, as the center decodes it
    ``steps``   local steps in this window so far; ``total``: in this worker's life
    ``moved``   length of the last local step; ``busy``: True if the center had a queue then (both only for schemes
                with ``go_on``)
    """

    def __init__(
        self, weights: Vector, *, rank: int = 0, workers: int = 1, slots: Iterable[str] = (), out: Vector | None = None
    ) -> None:
        self._local = weights
        self._out = out if out is not None else torch.empty_like(weights)
        self.rank = rank
        self.workers = workers
        self.anchor: Vector = weights
        self.center: Vector = weights
        self.sent: Vector | None = None
        self.at_send: Vector | None = None
        self.slots = Slots({name: torch.zeros_like(weights) for name in slots})
        self.version = 0
        self.steps = 0
        self.total = 0
        self.commits = 0
        self.adopted = 0
        """Clock of the center that the worker adopted last."""
        self.progress = 0.0
        """Share of the run's mini-batches that the center had applied, according to the last reply."""
        self.ahead = 0
        """Steps of this worker that ``progress`` does not include."""
        self.pulled: int | None = None
        """Clock of the center that was pulled just before the last commit; None if the scheme does not pull then."""
        self.by_reference = False
        """True if the center reads ``local`` and ``anchor`` itself and computes the difference."""
        self.untrained = Untrained(weights.new_empty(0), torch.empty(0, dtype=torch.int64))
        """The model's state besides its weights."""
        self.feedback: Feedback | None = None
        """Codes this worker's commits and keeps the residual; None: commits are sent uncoded."""
        self.lr = 0.0
        self.moved = 0.0
        self.busy = False
        self.unmeasured = MEASURED
        """Steps since the last measurement of the gradient's norm, for the record."""

    def measures(self, steps: int) -> bool:
        """Return whether to measure the gradient after this many further steps: each time costs a pass over memory."""
        self.unmeasured += steps
        if self.unmeasured < MEASURED:
            return False
        self.unmeasured = 0
        return True

    @property
    def local(self) -> Vector:
        """The worker's current weights."""
        return self._local

    @local.setter
    def local(self, value: Vector) -> None:
        if value is not self._local:
            self._local.copy_(value)

    @property
    def gradient(self) -> Vector:
        """The mean gradient of the window, for schemes that ship gradients."""
        return self._out

    def movement(self) -> Vector:
        """Return ``local - anchor``, written directly into the outgoing commit."""
        if self.by_reference:
            return self._local
        return kernels.subtract(self._out, self._local, self.anchor)

    def move(self, out: Vector | None) -> None:
        """Write commits into this vector from now on; None: continue with the present memory."""
        if out is not None:
            self._out = out

    def begin_again(self, center: Vector, version: int) -> None:
        """Adopt the center as it is: at the start, and after a rejected commit."""
        self.local = center
        self.anchor = self.center = center
        self.version = self.adopted = version
        self.at_send = None

    def state(self, vectors: Iterable[str], optimizer: WorkerState) -> dict[str, torch.Tensor]:
        """Return copies of everything a replacement needs to continue from the commit that leaves now.

        ``vectors`` are attributes that ``adopt`` reads, ``optimizer`` is the learner's state.
        """
        named = {OPTIMIZER + name: tensor for name, tensor in optimizer.items()}
        named |= {SLOT + name: slot for name, slot in self.slots.items()}
        named |= {name: vector for name in vectors if (vector := getattr(self, name)) is not None}
        named |= self.untrained.state() if "local" in vectors else {}
        pulled = -1 if self.pulled is None else self.pulled
        counters = [self.total, self.commits, self.version, self.adopted, self.ahead, pulled, self.progress]
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
        return {**copies, COUNTERS: torch.tensor(counters, dtype=torch.float64)}

    def load(self, state: WorkerState) -> dict[str, torch.Tensor]:
        """Continue from a state that ``state`` returned. Return the learner's part of it."""
        for name in self.slots:
            self.slots[name] = state[SLOT + name]
        if "local" in state:
            self.local = state["local"]
        for name in ("sent", "center"):
            if name in state:
                setattr(self, name, state[name].to(self.local.device, copy=True))
        self.untrained.load(state)
        *whole, self.progress = state[COUNTERS].tolist()
        self.total, self.commits, self.version, self.adopted, self.ahead, pulled = map(int, whole)
        self.pulled = None if pulled < 0 else pulled
        return {name.removeprefix(OPTIMIZER): tensor for name, tensor in state.items() if name.startswith(OPTIMIZER)}


class Untrained:
    """A worker's state besides its weights (batch-norm averages, counters), with its changes while a commit is in flight."""

    def __init__(self, buffers: Vector, integers: Vector) -> None:
        self.buffers = buffers
        self.integers = integers
        self._at_send = (buffers, integers)

    def sent(self) -> None:
        """Remember the state that a commit has left with, because the worker continues from it."""
        self._at_send = (self.buffers.clone(), self.integers.clone())

    def state(self) -> dict[str, torch.Tensor]:
        """Return the vectors that are not empty."""
        named = {"buffers": self.buffers, "integers": self.integers}
        return {name: vector for name, vector in named.items() if vector.numel()}

    def load(self, state: WorkerState) -> None:
        """Continue from a state that ``state`` returned when a commit left."""
        for name, vector in self.state().items():
            if name in state:
                vector.copy_(state[name])
        self.sent()

    def adopt(self, me: Replica, reply: Reply) -> None:
        """Adopt the center's state, plus this worker's changes since its commit left."""
        for mine, given, then in zip(
            (self.buffers, self.integers), (reply.buffers, reply.integers), self._at_send, strict=True
        ):
            if given is None or not mine.numel():
                continue
            if me.at_send is None or not reply.applied:
                mine.copy_(given)
            else:
                mine.add_(given - then)
