"""The center's own process coordinates the shards. For an update, each writes the next state of its slice; if all slices are
finite, all shards flip to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import torch

from paragrad import codecs
from paragrad.codecs.codec import Codec
from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.core.snapshot import ANSWER, OPTIMIZER, SLOT, CenterNumbers, CenterSnapshot
from paragrad.core.worker import DRAWN
from paragrad.engines.transport.connection import DEADLINE, deadline
from paragrad.engines.transport.message import PROTOCOL, TransportError, Vectors
from paragrad.engines.transport.transport import Channel, Header
from paragrad.errors import ParagradError, UsageError
from paragrad.learners.learner import Learner
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.optim.cut import CutOptimizer
from paragrad.types import COMMIT, Commit, VectorOptimizer

T = TypeVar("T")


def cuts(length: int, shards: int, codec: Codec | None = None) -> list[int]:
    """Return where a vector is cut: slice k begins at the k-th position. Blocks of a codec stay whole."""
    unit = 1 if codec is None else codec.unit
    units = -(-length // unit)
    return [min(units * k // shards * unit, length) for k in range(shards + 1)]


def check(job: Job, learner: Learner, shards: int, *, by_hand: bool = False) -> None:
    """Raise if a center cannot have this number of shards, or if some of them cannot be started ``by_hand``."""
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
        raise UsageError(f"{scheme!r} commits the vector in {scheme.parts} parts, which cannot be sharded: use shards=1.")
    if not scheme.elementwise:
        raise UsageError(
            f"{name} does not set elementwise = True: its center needs the whole vector, and cannot be sharded. Use shards=1."
        )
    _check_optimizer(name, job.center_optimizer(learner), by_hand=by_hand)


def _check_codec(codec: Codec, length: int, shards: int, *, by_hand: bool) -> None:
    name = type(codec).__name__
    if not codec.unit:
        raise UsageError(
            f"{name} does not define how an encoded vector is cut (unit, cut), and each shard needs a slice of it: leave codec "
            "out, or use shards=1."
        )
    where = cuts(length, shards, codec)
    if min(hi - lo for lo, hi in pairwise(where)) <= DRAWN:
        raise UsageError(
            f"shards={shards}, but codec={codec.name} keeps {codec.unit:,} elements together and the model has {length:,}: use "
            "fewer shards, or smaller blocks."
        )
    if by_hand and type(codec) not in map(codecs.load, codecs.names()):
        raise UsageError(
            f"{name} is a custom codec, and a shard that is started by hand finds its codec by name: let the center start all "
            "shards (shards_elsewhere=0)."
        )


def _check_optimizer(name: str, optimizer: VectorOptimizer | None, *, by_hand: bool) -> None:
    if optimizer is None:
        return
    if isinstance(optimizer, CenterOptimizer):
        why = optimizer.why_whole
    else:
        why = f"it is not an optimiser of torch.optim ({type(optimizer).__name__})"
    if why is not None:
        raise UsageError(
            f"The center of {name} holds the optimiser, which cannot be cut into slices: {why}. Use shards=1, an optimiser "
            "such as adam, or a scheme whose workers make the steps (modelaveraging, agn)."
        )
    assert isinstance(optimizer, CenterOptimizer)
    if by_hand and not optimizer.has_name:
        raise UsageError(
            f"The center of {name} holds the optimiser, which was made in Python, and a shard that is started by hand finds it "
            "by name: give optimizer and schedule by name ('adam:lr=0.001', 'cosine'), or let the center start all shards "
            "(shards_elsewhere=0)."
        )


class ShardCoordinator:
    """The slices of a center in other processes (``center.RemoteSlices``). All methods are called by the center's thread."""

    def __init__(self, center: Center, weights: torch.Tensor, cuts: Sequence[int], start_id: str) -> None:
        assert isinstance(center.optimizer, CutOptimizer | None)
        self._center = center
        self._optimizer = center.optimizer
        self._cuts = list(cuts)
        self._start_id = start_id
        self._start: tuple[Mapping[str, torch.Tensor], CenterNumbers] = {"value": weights}, center.numbers()
        self._channels: Sequence[Channel] = ()
        self._pool = ThreadPoolExecutor(len(cuts) - 2, "paragrad-shard")
        self._mend: Callable[[int, TransportError], None]
        self._update: Header = {}
        self._failure: ParagradError | None = None

    @property
    def slices(self) -> list[tuple[int, int]]:
        """Begin and end of each slice in another process."""
        return list(zip(self._cuts[1:-1], self._cuts[2:], strict=True))

    def begin(self, channels: Sequence[Channel], mend: Callable[[int, TransportError], None]) -> None:
        """Fill the shards. ``mend`` is called with the index of one that cannot be reached: it raises, or replaces the channel
        in ``channels`` if needed, and the call is repeated."""
        self._channels, self._mend = channels, mend
        tensors, numbers = self._start
        self._all(lambda k: self._fill(k, tensors, numbers))()
        self._start = {}, numbers

    def close(self, failure: ParagradError | None = None) -> None:
        """Stop using the shards; ``failure``: the reason why their slices are lost, if they are."""
        self._failure = failure
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- an update ------------------------------------------------------------------------------------------

    def prepare(self, commits: list[Commit]) -> Callable[[bool], bool]:
        """Begin to write the next state. Return a function: call it with whether the local slice is finite; it blocks and
        returns whether all slices are."""
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
                # A worker uploads no slice of a commit that is not finite, and sends NaN as its first slice.
                if "missing" in answer and here:
                    raise ParagradError(
                        f"Shard {k + 1} has lost its slice of a commit of worker {answer['missing'][0]}. Resume from the last "
                        "checkpoint."
                    )
            # A center that is not sharded checks the mean of a round as a whole, and would not have stepped at all.
            center.stepped = center.stepped and all(answer["finite"] or answer.get("stepped") for answer in found)
            return here and all(answer["finite"] for answer in found)

        return wait

    def flip(self) -> None:
        """Make the prepared state the current one."""
        waiting = [[c.worker, c.incarnation, c.sequence] for c in self._center.round.commits]
        header = {"clock": self._update["clock"], "waiting": waiting}
        self._all(lambda k: self._flip(k, header))()
        if self._optimizer is not None:
            self._optimizer.flip()

    def _flip(self, k: int, header: Header) -> None:
        if "unprepared" in self._ask(k, "flip", header):  # it was killed in between
            self._ask(k, "prepare", self._update)
            if "unprepared" in self._ask(k, "flip", header):
                raise ParagradError(f"Shard {k + 1} cannot repeat update {header['clock']}. Resume from the last checkpoint.")

    def hand(self, worker: int) -> None:
        """Write the value into a worker's row of replies."""
        header = {"worker": worker, "clock": self._center.clock}
        self._all(lambda k: self._ask(k, "hand", header))()

    # -- the whole ------------------------------------------------------------------------------------------

    def gather(self, local: CenterSnapshot) -> CenterSnapshot:
        """Return a snapshot of the whole."""
        if self._failure is not None:
            raise self._failure
        first, tensors = self._cuts[1], local.tensors()
        whole = {name: torch.empty(self._cuts[-1], dtype=t.dtype) for name, t in tensors.items() if _is_sharded(name, t)}
        for name, room in whole.items():
            room[:first] = tensors[name]
            if not self._channels:  # before ``begin``: their state is the one that they will be filled with
                room[first:] = self._filling(name, tensors[name])[first:]
        header = {"op": "gather", "clock": self._center.clock, "names": list(whole)}

        def fetch(k: int) -> None:
            lo, hi = self.slices[k]
            rooms = {name: room[lo:hi] for name, room in whole.items()}
            self._exchange(k, header, {}, rooms)

        self._all(fetch)()
        found = CenterSnapshot.read({**tensors, **whole}, local.numbers)
        if self._optimizer is not None:
            found.optimizer = dict(self._optimizer.to_whole(found.optimizer))
        return found

    def _filling(self, name: str, here: torch.Tensor) -> torch.Tensor:
        start = self._start[0]
        if name in start:
            return start[name]
        if name.startswith(OPTIMIZER):
            return here[:1].expand(self._cuts[-1])  # a new optimiser has the same state for all elements
        return torch.zeros_like(start["value"]) if name.startswith(SLOT) else start["value"]

    def scatter(self, whole: CenterSnapshot) -> CenterSnapshot:
        """Restore the slices from a snapshot of the whole; return the local part. Before ``begin``, the rest waits for it."""
        if self._optimizer is not None:
            whole = replace(whole, optimizer=dict(self._optimizer.of_whole(whole.optimizer)))
        tensors, numbers = whole.tensors(), whole.numbers
        if self._channels:
            self._all(lambda k: self._fill(k, tensors, numbers))()
        else:
            self._start = tensors, numbers
        mine = {name: t[: self._cuts[1]] if _is_sharded(name, t) else t for name, t in tensors.items()}
        return CenterSnapshot.read(mine, numbers)

    def whole_optimizer(self) -> VectorOptimizer | None:
        """Return a new optimiser of the whole value; None if the center has none."""
        return None if self._optimizer is None else self._optimizer.whole

    def _fill(self, k: int, tensors: Mapping[str, torch.Tensor], numbers: CenterNumbers) -> None:
        lo, hi = self.slices[k]
        mine = {name: t[lo:hi] for name, t in tensors.items() if _is_sharded(name, t)}
        for name in self._center.scheme.center_slots:
            mine.setdefault(f"{SLOT}{name}", torch.zeros_like(mine["value"]))
        mine |= {name: t.view(1) for name, t in tensors.items() if name.startswith(OPTIMIZER) and not t.ndim}
        header = {"op": "load", "clock": numbers.clock, "ledger": numbers.ledger, "versions": _versions(numbers)}
        self._exchange(k, header, mine, {})

    # -- inside ---------------------------------------------------------------------------------------------

    def _ask(self, k: int, name: str, header: Header) -> Header:
        header = {"protocol": PROTOCOL, "start_id": self._start_id, **header}
        return self._channels[k].ask(name, header, timeout=DEADLINE)

    def _exchange(self, k: int, header: Header, vectors: Vectors, into: Vectors) -> None:
        header = {**header, "start_id": self._start_id}
        self._channels[k].exchange(header, vectors, lambda back: into, timeout=deadline(vectors, 2 * DEADLINE))

    def _all(self, act: Callable[[int], T]) -> Callable[[], list[T]]:
        """Do the same at every shard in parallel. Return a function that waits for all results, and repeats failed calls."""
        calls = [self._pool.submit(act, k) for k in range(len(self._channels))]

        def wait() -> list[T]:
            found: list[T] = []
            for k, call in enumerate(calls):
                while True:
                    try:
                        found.append(call.result())
                        break
                    except TransportError as error:
                        self._mend(k, error)
                        call = self._pool.submit(act, k)
            return found

        return wait


def _is_sharded(name: str, tensor: torch.Tensor) -> bool:
    return name == "value" or (name.startswith((SLOT, ANSWER, OPTIMIZER)) and tensor.ndim > 0)


def _versions(numbers: CenterNumbers) -> list[int]:
    """Return the clock of each worker's last reply, or of the one that it waits for."""
    versions, presence = [numbers.clock] * len(numbers.ledger), numbers.presence
    if presence is not None:
        for worker, given in enumerate(presence.given):
            versions[worker] = versions[worker] if given is None else given.version
        for worker, owed in [*presence.owed.items(), *presence.resting.items()]:
            if owed.own:
                versions[worker] = owed.version
    return versions
