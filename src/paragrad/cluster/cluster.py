"""The simulated cluster: times of its parts, faults, churn, and the random draws of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

from paragrad.cluster.faults import Fault, Join, Leave, workers_of
from paragrad.cluster.times import Draws, Time, a_time, draws, mean_of, not_negative, positive
from paragrad.errors import UsageError

STEPS, DELAYS, UP, DOWN = 8, 9, 10, 11
"""Purposes of random numbers: part of the key of a stream, with the seed. (Below 8: the order of rows and others.)"""


@dataclass(frozen=True)
class Churn:
    """Workers come and go: each lives for a while, is lost without notice, and is replaced later."""

    up: Time
    """Lifetime of a worker in seconds."""
    down: Time
    """Seconds until its replacement joins."""

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            object.__setattr__(self, name, a_time(f"churn: {name}", getattr(self, name)))
        if not mean_of(self.up) > 0:
            raise UsageError(f"churn: up={self.up!r}, but a worker must live for some time: give a time above 0.")


class Lives(NamedTuple):
    """Lifetimes of one worker under churn: the n-th incarnation takes the n-th draw of each."""

    up: Draws
    down: Draws


@dataclass(frozen=True)
class Cluster:
    """A simulated cluster, on which any run can be tried on one machine.

    Times are seconds on the clock of the cluster: numbers, distributions or traces. A tuple gives one value per worker; if it
    is shorter than the number of workers, it is repeated.
    """

    speeds: Time | tuple[Time, ...] = 1.0
    """Seconds per local step; a tuple: per worker."""
    latency: Time | tuple[Time, ...] = 0.0
    """Seconds of a message one way; a tuple: per worker."""
    bandwidth: float | tuple[float, ...] | None = None
    """Bytes per second on the link of a worker; a tuple: per worker; none: unlimited."""
    center_rate: float | None = None
    """Commits per second that the center can apply; none: unlimited."""
    faults: tuple[Fault, ...] = ()
    """Faults and their times. A fault of a worker that is not there has no effect."""
    churn: Churn | None = None
    """Lifetime and absence of workers that come and go; none: they stay."""
    replace_after: float = 5.0
    """Seconds after which the other workers no longer wait for a lost one."""
    retry: float = 1.0
    """Seconds until a lost message is sent again."""

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {name: _each(name, getattr(self, name), a_time) for name in ("speeds", "latency")}
        speeds = checked["speeds"] if isinstance(checked["speeds"], tuple) else (checked["speeds"],)
        if not all(mean_of(time) > 0 for time in speeds):
            raise UsageError(f"speeds={self.speeds!r}, but a step takes some time: give seconds above 0.")
        if self.bandwidth is not None:
            rate = partial(positive, what="a number of bytes per second, or none for unlimited")
            checked["bandwidth"] = _each("bandwidth", self.bandwidth, rate)
        if self.center_rate is not None:
            what = "a number of commits per second, or none for unlimited"
            checked["center_rate"] = positive("center_rate", self.center_rate, what)
        faults = tuple(self.faults) if isinstance(self.faults, list | tuple) else (self.faults,)
        for fault in faults:
            if not isinstance(fault, get_args(Fault)):
                raise UsageError(
                    f"{fault!r} in faults is not a fault. Give a tuple of faults, such as (Crash(worker=2, at=30.0),)."
                )
        if self.churn is not None and not isinstance(self.churn, Churn):
            raise UsageError(f"churn={self.churn!r}, but it must be a Churn, such as Churn(up=600.0, down=30.0), or none.")
        checked["faults"] = faults
        checked["replace_after"] = not_negative("replace_after", self.replace_after, "a number of seconds")
        checked["retry"] = positive("retry", self.retry, "a number of seconds")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def check(self, workers: int) -> None:
        """Raise if the cluster does not fit this number of workers."""
        for name in ("speeds", "latency", "bandwidth"):
            given = getattr(self, name)
            if isinstance(given, tuple) and len(given) > workers:
                raise UsageError(
                    f"{name} has values for {len(given)} workers, but there are {workers}. Remove some, or use more workers."
                )
        for fault in self.faults:
            for rank in workers_of(fault):
                if rank >= workers:
                    known = f"0 to {workers - 1}" if workers > 1 else "0 alone"
                    raise UsageError(
                        f"{fault} names worker {rank}, but the workers are {known}. Name one of these, or use more workers."
                    )
        movers = sorted({fault.worker for fault in self.faults if isinstance(fault, Leave | Join)})
        present = [self._is_there_at_first(worker) for worker in movers]
        if len(movers) == workers and not any(present):
            raise UsageError(
                f"None of the {workers} workers is there at the start: each joins later, or leaves at once. "
                "Remove the Join or Leave of at least one."
            )

    def begins(self, worker: int) -> bool:
        """Return whether a worker is there before any fault: unless the first of its Leaves and Joins is a Join."""
        moves = self._moves(worker)
        return not (moves and isinstance(moves[0], Join))

    def there(self, worker: int, at: float) -> bool:
        """Return whether a worker is there just before a second, by its Leaves and Joins alone."""
        moves = [move for move in self._moves(worker) if move.at < at]
        return isinstance(moves[-1], Join) if moves else self.begins(worker)

    def steps(self, worker: int, incarnation: int, seed: int) -> Draws:
        """Return the times of a worker's local steps, without any Slow."""
        return draws(_of(self.speeds, worker), (seed, STEPS, worker, incarnation))

    def delays(self, worker: int, incarnation: int, seed: int) -> Draws:
        """Return the latencies of the messages from and to a worker, without ``transfer``."""
        return draws(_of(self.latency, worker), (seed, DELAYS, worker, incarnation))

    def lives(self, worker: int, seed: int) -> Lives | None:
        """Return the lifetimes and absences of a worker; None without churn."""
        if self.churn is None:
            return None
        return Lives(draws(self.churn.up, (seed, UP, worker)), draws(self.churn.down, (seed, DOWN, worker)))

    def transfer(self, worker: int, size_bytes: float) -> float:
        """Return the seconds that a number of bytes take on the link of a worker."""
        if self.bandwidth is None:
            return 0.0
        bandwidth: float = _of(self.bandwidth, worker)
        return size_bytes / bandwidth

    def _moves(self, worker: int) -> list[Leave | Join]:
        moves = [fault for fault in self.faults if isinstance(fault, Leave | Join) and fault.worker == worker]
        return sorted(moves, key=lambda move: move.at)

    def _is_there_at_first(self, worker: int) -> bool:
        """Return whether a worker is there after second 0; raise if its Joins and Leaves contradict each other."""
        there = at_first = self.begins(worker)
        before: Leave | Join | None = None
        for move in self._moves(worker):
            if isinstance(move, Join) == there:
                did, again = ("joined", "join again") if there else ("left", "leave again")
                what = "Leave" if there else "Join"
                raise UsageError(
                    f"{move}, but worker {worker} {did} before ({before}). To {again}, it needs a {what} in between."
                )
            there, before = not there, move
            at_first = there if move.at == 0 else at_first
        return at_first


def _each(name: str, given: Any, check: Callable[[str, Any], Any]) -> Any:
    """Check one value for all workers, or a tuple with one per worker."""
    if not isinstance(given, list | tuple):
        return check(name, given)
    if not given:
        raise UsageError(f"{name}={given!r} is empty: give one value, or one per worker.")
    return tuple(check(f"{name}[{place}]", value) for place, value in enumerate(given))


def _of(given: Any, worker: int) -> Any:
    return given[worker % len(given)] if isinstance(given, tuple) else given
