"""The center's side of a center that is spread: it decides, and the shards follow. Each writes the next state of its slice;
when all of them are finite, all flip to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch

from paragrad import codecs
from paragrad.codecs.codec import Codec
from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.core.snapshot import ANSWER, OPTIMIZER, SLOT, CenterNumbers, CenterSnapshot
from paragrad.core.worker import DRAWN
from paragrad.engines.transport.message import PROTOCOL, TransportError, Vectors
from paragrad.errors import ParagradError, UsageError
from paragrad.learners.learner import Learner
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.cut import CutOptimizer
from paragrad.types import COMMIT, Commit, VectorOptimizer

T = TypeVar("T")


def cuts(length: int, shards: int, codec: Codec | None = None) -> list[int]:
    """Where a vector is cut: slice k goes from the k-th to the next. What a codec keeps together is not cut in two."""
    unit = 1 if codec is None else codec.unit
    units = -(-length // unit)
    return [min(units * k // shards * unit, length) for k in range(shards + 1)]


def check(job: Job, learner: Learner, shards: int, *, by_hand: bool = False) -> None:
    """Raise where a center cannot be spread over so many processes, or not over some that are started ``by_hand``."""
    scheme, name, length = job.scheme, type(job.scheme).__name__, learner.weights.numel()
    if shards == 1:
        return
    if length // shards <= DRAWN:
        raise UsageError(
            f"shards={shards}, but the model has {length:,} parameters: a shard holds at least {DRAWN + 1} of them. Use "
            f"{max(1, length // (DRAWN + 1))} or fewer."
        )
    if job.codec is not None:
        _check_codec(job.codec, length, shards, by_hand=by_hand)
    if scheme.parts > 1:
        raise UsageError(f"{scheme!r} commits the vector in {scheme.parts} parts, which is a cut of its own: use shards=1.")
    if not scheme.elementwise:
        raise UsageError(
            f"{name} does not say elementwise = True: its center must see the whole vector, and cannot be spread. Use shards=1."
        )
    _check_optimizer(name, job.center_optimizer(learner), by_hand=by_hand)


def _check_codec(codec: Codec, length: int, shards: int, *, by_hand: bool) -> None:
    name = type(codec).__name__
    if not codec.unit:
        raise UsageError(
            f"{name} does not say where what it has coded can be cut (unit, cut), and a center that is spread has a slice of "
            "it in each shard: leave codec out, or use shards=1."
        )
    where = cuts(length, shards, codec)
    if min(hi - lo for lo, hi in pairwise(where)) <= DRAWN:
        raise UsageError(
            f"shards={shards}, but codec={codec.name} keeps {codec.unit:,} elements together and the model has {length:,}: use "
            "fewer shards, or smaller blocks."
        )
    if by_hand and type(codec) not in map(codecs.load, codecs.names()):
        raise UsageError(
            f"{name} is a codec of your own, and a shard that is started by hand learns of it by name: let the center start "
            "all shards (shards_elsewhere=0)."
        )


def _check_optimizer(name: str, optimizer: VectorOptimizer | None, *, by_hand: bool) -> None:
    if optimizer is None:
        return
    if isinstance(optimizer, CenterOptimizer):
        why = optimizer.why_whole
    else:
        why = f"it is no optimiser of torch.optim ({type(optimizer).__name__})"
    if why is not None:
        raise UsageError(
            f"The center of {name} holds the optimiser, which cannot be cut into slices: {why}. Use shards=1, an optimiser "
            "such as adam, or a scheme whose workers make the steps (modelaveraging, agn)."
        )
    assert isinstance(optimizer, CenterOptimizer)
    if by_hand and not optimizer.has_name:
        raise UsageError(
            f"The center of {name} holds the optimiser, which was made in Python, and a shard that is started by hand learns "
            "of it in words: give optimizer and schedule by name ('adam:lr=0.001', 'cosine'), or let the center start all "
            "shards (shards_elsewhere=0)."
        )


class Peer(Protocol):
    """A shard, as it is talked to."""

    def ask(self, name: str, header: Mapping[str, Any]) -> dict[str, Any]:
        """One question."""

    def exchange(
        self, header: Mapping[str, Any], vectors: Vectors, into: Callable[[dict[str, Any]], Vectors]
    ) -> dict[str, Any]:
        """A header and vectors there, and back."""


class ShardCoordinator:
    """What lies of a center in other processes (``center.RemoteSlices``). All is called by the thread of the center."""

    def __init__(self, center: Center, weights: torch.Tensor, cuts: Sequence[int], start_id: str) -> None:
        assert isinstance(center.optimizer, CutOptimizer | None)
        self._center = center
        self._optimizer = center.optimizer
        self._cuts = list(cuts)
        self._start_id = start_id
        self._start: tuple[Mapping[str, torch.Tensor], CenterNumbers] = {"value": weights}, center.numbers()
        self._peers: list[Peer] = []
        self._pool = ThreadPoolExecutor(len(cuts) - 2, "paragrad-shard")
        self._mend: Callable[[int, TransportError], None] = _raise
        self._update: dict[str, Any] = {}
        self._failure: ParagradError | None = None

    @property
    def slices(self) -> list[tuple[int, int]]:
        """From where to where those go that lie elsewhere."""
        return list(zip(self._cuts[1:-1], self._cuts[2:], strict=True))

    def begin(self, peers: Sequence[Peer], mend: Callable[[int, TransportError], None]) -> None:
        """They are there, and are filled. ``mend`` is called with the number of one that could not be reached, from 0 on: it
        raises, or the same is tried again."""
        self._peers, self._mend = list(peers), mend
        tensors, numbers = self._start
        self._all(lambda k: self._fill(k, tensors, numbers))()
        self._start = {}, numbers

    def close(self, failure: ParagradError | None = None) -> None:
        """They are there no longer; with a ``failure`` where they could not give back what they hold."""
        self._failure = failure
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- an update ------------------------------------------------------------------------------------------

    def prepare(self, commits: list[Commit]) -> Callable[[bool], bool]:
        """Begin to write the next state there; the answer, told whether it is finite here, waits, and says whether all is."""
        center = self._center
        self._update = {
            "clock": center.clock + 1,
            "commits": [COMMIT.header(commit) for commit in commits],
            "live": sorted(center.live),
            "working": list(center.working),
            "counts": list(center.ledger.commits),
            "speeds": list(center.ledger.speeds),
            "progress": center.progress,
        }
        answers = self._all(lambda k: self._ask(k, "prepare", self._update))
        if self._optimizer is not None:
            self._optimizer.begin()

        def wait(here: bool) -> bool:
            found = answers()
            for k, answer in enumerate(found):
                # A commit that its worker saw not to be finite is laid down nowhere, and its first slice is not finite.
                if "missing" in answer and here:
                    raise ParagradError(
                        f"Shard {k + 1} has lost what worker {answer['missing'][0]} sent to it. Go on from the last checkpoint."
                    )
            # One center would have looked at the whole of a round's mean, and not have stepped at all.
            center.stepped = center.stepped and all(answer["finite"] or answer.get("stepped") for answer in found)
            return here and all(answer["finite"] for answer in found)

        return wait

    def flip(self) -> None:
        """What was prepared is the state now."""
        waiting = [[c.worker, c.incarnation, c.sequence] for c in self._center.round.commits]
        said = {"clock": self._update["clock"], "waiting": waiting}
        self._all(lambda k: self._flip(k, said))()
        if self._optimizer is not None:
            self._optimizer.flip()

    def _flip(self, k: int, said: Mapping[str, Any]) -> None:
        if "unprepared" in self._ask(k, "flip", said):  # it was killed in between
            self._ask(k, "prepare", self._update)
            if "unprepared" in self._ask(k, "flip", said):
                raise ParagradError(f"Shard {k + 1} cannot make update {said['clock']} again. Go on from the last checkpoint.")

    def hand(self, worker: int) -> None:
        """This worker's answer is the value as it is."""
        said = {"worker": worker, "clock": self._center.clock}
        self._all(lambda k: self._ask(k, "hand", said))()

    # -- the whole ------------------------------------------------------------------------------------------

    def gather(self, local: CenterSnapshot) -> CenterSnapshot:
        """Return a snapshot of the whole."""
        if self._failure is not None:
            raise self._failure
        first, tensors = self._cuts[1], local.tensors()
        whole = {name: torch.empty(self._cuts[-1], dtype=t.dtype) for name, t in tensors.items() if _is_spread(name, t)}
        for name, room in whole.items():
            room[:first] = tensors[name]
            if not self._peers:  # nothing has begun: they hold what they will be filled with
                room[first:] = self._filling(name, tensors[name])[first:]
        said = {"op": "gather", "clock": self._center.clock, "names": list(whole)}

        def fetch(k: int) -> None:
            lo, hi = self.slices[k]
            rooms = {name: room[lo:hi] for name, room in whole.items()}
            self._peers[k].exchange({**said, "start_id": self._start_id}, {}, lambda back: rooms)

        self._all(fetch)()
        found = CenterSnapshot.read({**tensors, **whole}, local.numbers)
        if self._optimizer is not None:
            found.optimizer = dict(self._optimizer.to_whole(found.optimizer))
        return found

    def _filling(self, name: str, here: torch.Tensor) -> torch.Tensor:
        start = self._start[0]
        if name.startswith(OPTIMIZER) and name not in start:
            return here[:1].expand(self._cuts[-1])  # a new optimiser has the same for all elements
        found = start.get(name, start["value"])
        return torch.zeros_like(found) if name.startswith(SLOT) and name not in start else found

    def scatter(self, whole: CenterSnapshot) -> CenterSnapshot:
        """The inverse; returns the local part. Before ``begin`` the rest is kept until then."""
        if self._optimizer is not None:
            whole = replace(whole, optimizer=dict(self._optimizer.of_whole(whole.optimizer)))
        tensors, numbers = whole.tensors(), whole.numbers
        if self._peers:
            self._all(lambda k: self._fill(k, tensors, numbers))()
        else:
            self._start = tensors, numbers
        mine = {name: t[: self._cuts[1]] if _is_spread(name, t) else t for name, t in tensors.items()}
        return CenterSnapshot.read(mine, numbers)

    def whole_optimizer(self) -> VectorOptimizer | None:
        """One for all of the value, as after it was made; None where the center has none."""
        return None if self._optimizer is None else self._optimizer.whole

    def _fill(self, k: int, tensors: Mapping[str, torch.Tensor], numbers: CenterNumbers) -> None:
        lo, hi = self.slices[k]
        mine = {name: t[lo:hi] for name, t in tensors.items() if _is_spread(name, t)}
        for name in self._center.scheme.center_slots:
            mine.setdefault(f"{SLOT}{name}", torch.zeros_like(mine["value"]))
        mine |= {name: t.view(1) for name, t in tensors.items() if name.startswith(OPTIMIZER) and not t.ndim}
        said = {"op": "load", "clock": numbers.clock, "ledger": numbers.ledger, "versions": _versions(numbers)}
        self._peers[k].exchange({**said, "start_id": self._start_id}, mine, lambda back: {})

    # -- inside ---------------------------------------------------------------------------------------------

    def _ask(self, k: int, name: str, said: Mapping[str, Any]) -> dict[str, Any]:
        return self._peers[k].ask(name, {"protocol": PROTOCOL, "start_id": self._start_id, **said})

    def _all(self, act: Callable[[int], T]) -> Callable[[], list[T]]:
        """The same at every shard, at once; the answer waits for all, whatever becomes of one of them."""
        flights = [self._pool.submit(act, k) for k in range(len(self._peers))]

        def wait() -> list[T]:
            found: list[T] = []
            for k, flight in enumerate(flights):
                while True:
                    try:
                        found.append(flight.result())
                        break
                    except TransportError as error:
                        self._mend(k, error)
                        flight = self._pool.submit(act, k)
            return found

        return wait


def _raise(k: int, error: TransportError) -> None:
    raise error


def _is_spread(name: str, tensor: torch.Tensor) -> bool:
    return name == "value" or (name.startswith((SLOT, ANSWER, OPTIMIZER)) and tensor.ndim > 0)


def _versions(numbers: CenterNumbers) -> list[int]:
    """Return the clock of each worker's reply: as it was given, or as it is owed."""
    versions, presence = [numbers.clock] * len(numbers.ledger), numbers.presence
    if presence is not None:
        for worker, given in enumerate(presence.given):
            versions[worker] = versions[worker] if given is None else given.version
        for worker, owed in [*presence.owed.items(), *presence.resting.items()]:
            if owed.own:
                versions[worker] = owed.version
    return versions
