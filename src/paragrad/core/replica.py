"""One worker's vectors and counters, as a scheme sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping

import torch

from paragrad.codecs.feedback import Feedback
from paragrad.core import kernels
from paragrad.errors import UsageError
from paragrad.types import Reply, Vector, WorkerState

OPTIMIZER, SLOT, COUNTERS = "optimizer.", "slot.", "counters"
"""Names in a worker's state: what begins with the first is the learner's, with the second the scheme's."""

MEASURED = 5
"""Local steps between two measurements of the gradient's length, at least."""


class Slots(MutableMapping[str, Vector]):
    """Named vectors of fixed length: assignment copies into place, so that what holds them never moves."""

    def __init__(self, vectors: dict[str, Vector]) -> None:
        self._vectors = vectors

    def __getitem__(self, name: str) -> Vector:
        try:
            return self._vectors[name]
        except KeyError:
            known = ", ".join(map(repr, self._vectors)) or "none"
            raise UsageError(
                f"The scheme uses the slot {name!r}, but has declared {known}: name it in center_slots or worker_slots."
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

    def narrow(self, lo: int, hi: int) -> Slots:
        """The same slots, elements lo to hi."""
        return Slots({name: vector[lo:hi] for name, vector in self._vectors.items()})


class Replica:
    """``me`` in a scheme. Anchor, adopted weights and last seen center are three different things.

    ``local``   the weights now (assignment copies into the model)
    ``anchor``  what this window began from
    ``center``  the center as last seen
    ``at_send`` the weights when the last commit left, where a window was computed since; else None
    ``sent``    the value of the last commit, as the center decodes it
    ``steps``   local steps of this window so far; ``total``: of this worker's life
    ``moved``   length of the last local step; ``busy``: whether the center had a queue then (both only
                for schemes with ``go_on``)
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
        """The clock of the center that was adopted last."""
        self.progress = 0.0
        """Share of the run's mini-batches that the center had applied, as the worker last heard."""
        self.ahead = 0
        """Steps that the worker has made and that are not in it."""
        self.pulled: int | None = None
        """The clock of the center that was pulled just before the last commit; None where the scheme does not ask for it."""
        self.by_reference = False
        """The center can read ``local`` and ``anchor`` itself: the difference is left to it."""
        self.untrained = Untrained(weights.new_empty(0), torch.empty(0, dtype=torch.int64))
        """The model's state beside its weights."""
        self.feedback: Feedback | None = None
        """What codes this worker's commits, and keeps what that leaves out; None: they are sent as they are."""
        self.lr = 0.0
        self.moved = 0.0
        self.busy = False
        self.unmeasured = MEASURED
        """Steps since the gradient was last measured, for the record."""

    def measures(self, steps: int) -> bool:
        """Whether the gradient is measured after so many further steps: a pass over memory, and so not after each."""
        self.unmeasured += steps
        if self.unmeasured < MEASURED:
            return False
        self.unmeasured = 0
        return True

    @property
    def local(self) -> Vector:
        """The worker's weights, live."""
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
        """``local - anchor``, written straight into the outgoing commit."""
        if self.by_reference:
            return self._local
        return kernels.subtract(self._out, self._local, self.anchor)

    def move(self, out: Vector | None) -> None:
        """Commits are laid out elsewhere from now on; None: where they are, in memory of this worker's own."""
        if out is not None:
            self._out = out

    def begin_again(self, center: Vector, version: int) -> None:
        """Take the center as it is: at the start, and after a commit that was refused or dropped."""
        self.local = center
        self.anchor = self.center = center
        self.version = self.adopted = version
        self.at_send = None

    def state(self, vectors: Iterable[str], optimizer: WorkerState) -> dict[str, torch.Tensor]:
        """Copies of what another worker in this place needs to go on, taken when a commit leaves: ``vectors`` are attributes
        that ``adopt`` reads, ``optimizer`` is the learner's state."""
        named = {OPTIMIZER + name: tensor for name, tensor in optimizer.items()}
        named |= {SLOT + name: slot for name, slot in self.slots.items()}
        named |= {name: vector for name in vectors if (vector := getattr(self, name)) is not None}
        named |= self.untrained.state() if "local" in vectors else {}
        pulled = -1 if self.pulled is None else self.pulled
        counters = [self.total, self.commits, self.version, self.adopted, self.ahead, pulled, self.progress]
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
        return {**copies, COUNTERS: torch.tensor(counters, dtype=torch.float64)}

    def load(self, state: WorkerState) -> dict[str, torch.Tensor]:
        """The inverse; returns what is the learner's."""
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
    """A worker's state beside its weights (batch-norm's averages, counters): what happens to it in flight is carried too."""

    def __init__(self, buffers: Vector, integers: Vector) -> None:
        self.buffers = buffers
        self.integers = integers
        self._at_send = (buffers, integers)

    def sent(self) -> None:
        """A commit has left with the state as it is; its worker may go on."""
        self._at_send = (self.buffers.clone(), self.integers.clone())

    def state(self) -> dict[str, torch.Tensor]:
        """What was sent with the commit that leaves, where there is any."""
        named = {"buffers": self.buffers, "integers": self.integers}
        return {name: vector for name, vector in named.items() if vector.numel()}

    def load(self, state: WorkerState) -> None:
        """The inverse: be as when that commit left."""
        for name, vector in self.state().items():
            if name in state:
                vector.copy_(state[name])
        self.sent()

    def adopt(self, me: Replica, reply: Reply) -> None:
        """Take the center's, and what was added to one's own since the commit left."""
        for mine, given, then in zip(
            (self.buffers, self.integers), (reply.buffers, reply.integers), self._at_send, strict=True
        ):
            if given is None or not mine.numel():
                continue
            if me.at_send is None or not reply.applied:
                mine.copy_(given)
            else:
                mine.add_(given - then)
