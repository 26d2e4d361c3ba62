"""The virtual cluster: what its parts cost in seconds, which faults strike it, and the draws that make this definite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from paragrad.cluster.faults import Fault, Join, Leave, workers_of
from paragrad.cluster.times import Draws, Time, a_time, draws, mean_of, not_negative, positive
from paragrad.errors import UsageError

STEPS, DELAYS, UP, DOWN = 8, 9, 10, 11
"""What a random number is for: with the seed, the key of its stream. (Below 8: the order of rows and the like.)"""


@dataclass(frozen=True)
class Churn:
    """Workers come and go all the time: each lives for a while, is lost without notice, and is replaced after a while."""

    up: Time
    """Seconds that a worker lives."""
    down: Time
    """Seconds until its replacement joins."""

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            object.__setattr__(self, name, a_time(f"churn: {name}", getattr(self, name)))
        if not mean_of(self.up) > 0:
            raise UsageError(f"churn: up={self.up!r}, but workers must live for some time: give one above 0.")


class Lives(NamedTuple):
    """The lives of one worker under churn: the n-th incarnation draws the n-th of each."""

    up: Draws
    """Seconds that it lives."""
    down: Draws
    """Seconds until the next one joins."""


@dataclass(frozen=True)
class Cluster:
    """A cluster that exists only as numbers, on which any run can be tried on one machine.

    Times are seconds on the cluster's own clock: numbers, or distributions and traces to draw from. What differs between
    workers is given as a tuple; one that is shorter than there are workers is repeated in turn.
    """

    speeds: Time | tuple[Time, ...] = 1.0
    """Seconds that one local step takes; a tuple: of each worker."""
    latency: Time | tuple[Time, ...] = 0.0
    """Seconds that a message takes one way; a tuple: of each worker."""
    bandwidth: float | tuple[float, ...] | None = None
    """Bytes a second on the link of a worker, a tuple: of each; none: any number."""
    center_rate: float | None = None
    """Commits a second that the center can apply; none: at once."""
    faults: tuple[Fault, ...] = ()
    """What goes wrong, and when. A fault that finds its worker gone does nothing."""
    churn: Churn | None = None
    """How long workers live and are away, if they come and go; none: they stay."""
    replace_after: float = 5.0
    """Seconds after which the others no longer wait for a lost worker."""
    retry: float = 1.0
    """Seconds after which a message that was lost is sent again."""

    def __post_init__(self) -> None:
        settled: dict[str, Any] = {}
        for name in ("speeds", "latency"):
            settled[name] = _each(name, getattr(self, name), a_time)
        for time in _several(settled["speeds"]):
            if not mean_of(time) > 0:
                raise UsageError(f"speeds={self.speeds!r}, but a step takes some time: give seconds above 0.")
        if self.bandwidth is not None:
            settled["bandwidth"] = _each("bandwidth", self.bandwidth, _rate("bytes a second, or none for unlimited"))
        if self.center_rate is not None:
            settled["center_rate"] = _rate("commits a second, or none for at once")("center_rate", self.center_rate)
        faults = tuple(self.faults) if isinstance(self.faults, list | tuple) else (self.faults,)
        for fault in faults:
            if not isinstance(fault, get_args(Fault)):
                raise UsageError(
                    f"{fault!r} in faults is no fault. Give a tuple of faults, such as (Crash(worker=2, at=30.0),)."
                )
        if self.churn is not None and not isinstance(self.churn, Churn):
            raise UsageError(f"churn={self.churn!r}, but it is a Churn, such as Churn(up=600.0, down=30.0), or none.")
        settled["faults"] = faults
        settled["replace_after"] = not_negative("replace_after", self.replace_after, "a number of seconds")
        settled["retry"] = positive("retry", self.retry, "a number of seconds")
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    def check(self, workers: int) -> None:
        """Raise where this cluster does not fit that many workers."""
        for name in ("speeds", "latency", "bandwidth"):
            given = getattr(self, name)
            if isinstance(given, tuple) and len(given) > workers:
                raise UsageError(
                    f"{name} is given for {len(given)} workers, but there are {workers}: leave some out, or take more workers."
                )
        for fault in self.faults:
            for rank in workers_of(fault):
                if rank >= workers:
                    there = f"0 to {workers - 1}" if workers > 1 else "0 alone"
                    raise UsageError(
                        f"{fault} strikes worker {rank}, but the workers are {there}: name one of these, or take more workers."
                    )
        movers = sorted({fault.worker for fault in self.faults if isinstance(fault, Leave | Join)})
        there_at_first = [self._there_at_first(worker) for worker in movers]
        if len(movers) == workers and not any(there_at_first):
            raise UsageError(
                f"None of the {workers} workers is there at the start: each joins later, or leaves at once. "
                "Leave out the Join or Leave of at least one."
            )

    def begins(self, worker: int) -> bool:
        """Whether a worker is there before any fault strikes: unless the first of its Leaves and Joins is a Join."""
        moves = self._moves(worker)
        return not (moves and isinstance(moves[0], Join))

    def there(self, worker: int, at: float) -> bool:
        """Whether a worker is there at a second, before what happens in that second: by its Leaves and Joins alone."""
        moves = [move for move in self._moves(worker) if move.at < at]
        return isinstance(moves[-1], Join) if moves else self.begins(worker)

    def steps(self, worker: int, incarnation: int, seed: int) -> Draws:
        """Seconds of a worker's local steps, one after another, before any Slow."""
        return draws(_of(self.speeds, worker), (seed, STEPS, worker, incarnation))

    def delays(self, worker: int, incarnation: int, seed: int) -> Draws:
        """Seconds that the messages from and to a worker take one way, one after another, before ``transfer``."""
        return draws(_of(self.latency, worker), (seed, DELAYS, worker, incarnation))

    def lives(self, worker: int, seed: int) -> Lives | None:
        """How long the incarnations of a worker live and are away, one after another; None where there is no churn."""
        if self.churn is None:
            return None
        return Lives(draws(self.churn.up, (seed, UP, worker)), draws(self.churn.down, (seed, DOWN, worker)))

    def transfer(self, worker: int, size_bytes: float) -> float:
        """Seconds that so many bytes take on a worker's link."""
        if self.bandwidth is None:
            return 0.0
        bandwidth: float = _of(self.bandwidth, worker)
        return size_bytes / bandwidth

    def _moves(self, worker: int) -> list[Leave | Join]:
        moves = [fault for fault in self.faults if isinstance(fault, Leave | Join) and fault.worker == worker]
        return sorted(moves, key=lambda move: move.at)

    def _there_at_first(self, worker: int) -> bool:
        """Whether a worker is there when time begins to pass; raises where its comings and goings contradict each other."""
        there = at_first = self.begins(worker)
        before: Leave | Join | None = None
        for move in self._moves(worker):
            if isinstance(move, Join) == there:
                did, again = ("joined", "join again") if there else ("left", "leave again")
                what = "Leave" if there else "Join"
                raise UsageError(
                    f"{move}, but worker {worker} {did} before ({before}): to {again}, it needs a {what} in between."
                )
            there, before = not there, move
            at_first = there if move.at == 0 else at_first
        return at_first


def _each(name: str, given: Any, settle: Any) -> Any:
    """A value for all workers, or a tuple with one for each, every one checked."""
    if not isinstance(given, list | tuple):
        return settle(name, given)
    if not given:
        raise UsageError(f"{name}={given!r} is empty: give one value, or one for each worker.")
    return tuple(settle(f"{name}[{place}]", value) for place, value in enumerate(given))


def _rate(what: str) -> Any:
    return lambda name, value: positive(name, value, f"a number of {what}")


def _several(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _of(given: Any, worker: int) -> Any:
    return given[worker % len(given)] if isinstance(given, tuple) else given
