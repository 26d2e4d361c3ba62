"""The center's side of a center that is spread: it decides, and the shards follow. Each writes the next state of its slice;
when all of them are finite, all flip to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch

from paragrad.center import Center
from paragrad.engines.slice import FLOATS, NUMBERS
from paragrad.errors import ParagradError, UsageError
from paragrad.job import Job
from paragrad.learners.learner import Learner
from paragrad.record import fold
from paragrad.transport.message import PROTOCOL, TransportError, Vectors
from paragrad.types import Commit
from paragrad.worker import DRAWN

T = TypeVar("T")


def cuts(length: int, shards: int) -> list[int]:
    """Where a vector is cut: slice k goes from the k-th to the next."""
    return [length * k // shards for k in range(shards + 1)]


def check(job: Job, learner: Learner, shards: int) -> None:
    """Raise where a center cannot be spread over so many processes."""
    scheme, name, length = job.scheme, type(job.scheme).__name__, learner.weights.numel()
    if shards == 1:
        return
    if length // shards <= DRAWN:
        raise UsageError(
            f"shards={shards}, but the model has {length:,} parameters: a shard holds at least {DRAWN + 1} of them. Use "
            f"{max(1, length // (DRAWN + 1))} or fewer."
        )
    if job.codec is not None:
        raise UsageError(f"codec={job.codec.name} is not cut into slices: leave codec out, or use shards=1.")
    if scheme.ships == "gradient":
        raise UsageError(
            f"The center of {name} holds the optimiser, whose state is not spread over shards. Use shards=1, or a scheme whose "
            "workers make the steps (modelaveraging, agn)."
        )
    if scheme.parts > 1:
        raise UsageError(f"{scheme!r} commits the vector in {scheme.parts} parts, which is a cut of its own: use shards=1.")
    if not scheme.elementwise:
        raise UsageError(
            f"{name} does not say elementwise = True: its center must see the whole vector, and cannot be spread. Use shards=1."
        )


class Peer(Protocol):
    """A shard, as it is talked to."""

    def ask(self, name: str, head: Mapping[str, Any]) -> dict[str, Any]:
        """One question."""

    def exchange(self, head: Mapping[str, Any], vectors: Vectors, into: Callable[[dict[str, Any]], Vectors]) -> dict[str, Any]:
        """A head and vectors there, and back."""


class Shards:
    """What lies of a center in other processes (``center.Elsewhere``). All is called by the thread of the center."""

    def __init__(self, center: Center, weights: torch.Tensor, cuts: Sequence[int], life: str) -> None:
        self._center = center
        self._cuts = list(cuts)
        self._life = life
        self._start: tuple[Mapping[str, torch.Tensor], Mapping[str, Any]] = {"value": weights}, center.snapshot_numbers()
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
        self._start = {}, {}

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
            "commits": [_head_of(commit) for commit in commits],
            "live": sorted(center.live),
            "working": list(center.working),
            "counts": list(center.commits_of),
            "speeds": list(center.speeds),
            "progress": center.progress,
        }
        answers = self._all(lambda k: self._ask(k, "prepare", self._update))

        def wait(here: bool) -> bool:
            found = answers()
            for k, answer in enumerate(found):
                # A commit that its worker saw not to be finite is laid down nowhere, and its first slice is not finite.
                if "missing" in answer and here:
                    raise ParagradError(
                        f"Shard {k + 1} has lost what worker {answer['missing'][0]} sent to it. Go on from the last checkpoint."
                    )
            return here and all(answer["finite"] for answer in found)

        return wait

    def flip(self) -> None:
        """What was prepared is the state now."""
        waiting = [[c.worker, c.incarnation, c.sequence] for c in self._center.waiting]
        said = {"clock": self._update["clock"], "waiting": waiting}
        self._all(lambda k: self._flip(k, said))()

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

    def gather(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What lies here, and what lies there, as one."""
        if self._failure is not None:
            raise self._failure
        first = self._cuts[1]
        whole = {name: torch.empty(self._cuts[-1], dtype=t.dtype) for name, t in tensors.items() if _is_spread(name)}
        for name, room in whole.items():
            room[:first] = tensors[name]
            if not self._peers:  # nothing has begun: they hold what they will be filled with
                room[first:] = self._filling(name)[first:]
        said = {"op": "gather", "clock": self._center.clock, "names": list(whole)}

        def fetch(k: int) -> None:
            lo, hi = self.slices[k]
            rooms = {name: room[lo:hi] for name, room in whole.items()}
            self._peers[k].exchange({**said, "life": self._life}, {}, lambda back: rooms)

        self._all(fetch)()
        return {**tensors, **whole}

    def _filling(self, name: str) -> torch.Tensor:
        start = self._start[0]
        found = start.get(name, start["value"])
        return torch.zeros_like(found) if name.startswith("slot.") and name not in start else found

    def scatter(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """The inverse; returns what lies here. Before ``begin`` it is kept until then."""
        if self._peers:
            self._all(lambda k: self._fill(k, tensors, numbers))()
        else:
            self._start = dict(tensors), dict(numbers)
        return {name: t[: self._cuts[1]] if _is_spread(name) else t for name, t in tensors.items()}

    def _fill(self, k: int, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        lo, hi = self.slices[k]
        names = {name for name in tensors if _is_spread(name)} | {f"slot.{name}" for name in self._center.scheme.center_slots}
        mine = {name: (tensors[name] if name in tensors else torch.zeros_like(tensors["value"]))[lo:hi] for name in names}
        said = {"op": "load", "clock": numbers["clock"], "ledger": numbers["ledger"], "versions": _versions(numbers)}
        self._peers[k].exchange({**said, "life": self._life}, mine, lambda back: {})

    # -- inside ---------------------------------------------------------------------------------------------

    def _ask(self, k: int, name: str, said: Mapping[str, Any]) -> dict[str, Any]:
        return self._peers[k].ask(name, {"protocol": PROTOCOL, "life": self._life, **said})

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


def _is_spread(name: str) -> bool:
    return name == "value" or name.startswith(("slot.", "answer."))


def _versions(numbers: Mapping[str, Any]) -> list[int]:
    """The clock of each worker's answer: as it was given, or as it is owed."""
    versions = [int(numbers["clock"])] * len(numbers["ledger"])
    present = numbers.get("present")
    if present is not None:
        for worker, given in enumerate(present["given"]):
            versions[worker] = versions[worker] if given is None else given["version"]
        for worker, owed in [*present["owed"].items(), *present["resting"].items()]:
            if owed["own"]:
                versions[int(worker)] = owed["version"]
    return versions


def _head_of(commit: Commit) -> dict[str, Any]:
    told: dict[str, Any] = {name: getattr(commit, name) for name in (*NUMBERS, *FLOATS)}
    return told | {"batches": fold(commit.batches), "pulls": list(commit.pulls)}
