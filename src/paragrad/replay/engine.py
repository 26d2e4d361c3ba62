"""Repeats a run in one process, with the same worker loop, center and learners, in the order of arrivals at its center.

A window depends only on the answers that its worker adopted and on its mini-batches. So it is computed when its commit is due.
The centers that the worker read, whose clocks are in the record, are kept until then.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.core.replica import Replica
from paragrad.core.snapshot import CenterSnapshot
from paragrad.core.state import private
from paragrad.core.worker import JOIN, WAIT, Driver, Wait, work
from paragrad.engines.exchange.center_loop import longest_window, make_center, one_thread
from paragrad.engines.exchange.slot import Slot
from paragrad.engines.exchange.worker import Exchange, warm_learner
from paragrad.errors import NotReplayed, ParagradError, UsageError
from paragrad.learners.learner import Learner
from paragrad.replay.history import Arrival, Attempt, History
from paragrad.schemes.scheme import Scheme
from paragrad.schemes.traits import is_shared
from paragrad.types import Commit, Reply, Vector


class Replay:
    """Repeats a history, or raises ``NotReplayed`` where the replay differs from it."""

    def __init__(
        self, job: Job, learner: Learner, history: History, *, updated: Callable[[Center], None] = lambda center: None
    ) -> None:
        if is_shared(job.scheme):
            raise UsageError(
                f"A run of {type(job.scheme).__name__} cannot be replayed: its workers write into the center at the same time "
                "and without a lock, so that there is no order to repeat."
            )
        self.job = job
        self.learner = learner
        """Has the initial weights."""
        self.history = history
        self.updated = updated
        """Called with the center at the start of an attempt and after every update."""
        self.notes: list[str] = []
        self.commits = 0
        self.strayed: Arrival | None = None
        """First commit whose loss differs from the record."""

    def run(self) -> Center:
        """Repeat the whole history; return the final center."""
        snapshot: CenterSnapshot | None = None
        with one_thread():
            for attempt, following in zip(self.history.attempts, [*self.history.attempts[1:], None], strict=True):
                stage = _Stage(self, attempt)
                if snapshot is not None:
                    stage.go_on_from(snapshot)
                stage.play(None if following is None else following.begins)
                snapshot = stage.center.snapshot()
        return stage.center


class _Stage:
    """One attempt of a run: its center, its workers, and the centers that workers read."""

    def __init__(self, replay: Replay, attempt: Attempt) -> None:
        self.replay = replay
        self.attempt = attempt
        start = attempt.start
        workers: int = start["workers"]
        job = self.job = replace(replay.job, plan=replace(replay.job.plan, epochs=start["epochs"]))
        self._over_network = start["engine"].startswith("network")
        self.center = make_center(
            job,
            replay.learner,
            workers=workers,
            partition=start["partition"],
            allocate=private,
            by_reference=not self._over_network,
        )
        self.center.applied, self.center.refused, self.center.repeated = self._applied, self._refused, self._repeated
        options: Any = {"window": longest_window(job), "by_reference": bool(self.center.homes), "residuals": True}
        self._slots = [Slot.make(private, rank, job, replay.learner, **options) for rank in range(workers)]
        self._actors: dict[int, _Actor] = {}
        self._values_read = _CenterValues(attempt, pulled_answers=not self.center.answers)
        self._clock = -1

    def go_on_from(self, snapshot: CenterSnapshot) -> None:
        """Restore the center from a snapshot, as a resumed run does."""
        snapshot.numbers.leases = {**snapshot.numbers.leases, "epochs": self.job.plan.epochs}
        self.center.restore(snapshot)

    def play(self, until: int | None) -> None:
        """Repeat the arrivals up to this number; None: until the last update of the attempt."""
        self._report_update()
        for number in count(self.attempt.begins + 1):
            if number > until if until is not None else self.center.clock >= self.attempt.clock:
                break
            arrival = self.attempt.arrivals.get(number)
            if arrival is None:
                self._missing(number, last=until is None)
                break
            try:
                self._deliver(self._arrive(arrival))
            except NotReplayed:
                raise
            except ParagradError as error:
                raise _not_replayed(arrival, str(error)) from error
            self._values_read.forget(number)

    # -- arrivals -------------------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival) -> list[Reply]:
        worker = arrival.worker
        match arrival.kind:
            case "join":
                self._actors[worker] = self._make(worker, arrival.incarnation)
                if not arrival.state:
                    self.center.private.restored.pop(worker, None)
                return self.center.join(worker, arrival.incarnation)
            case "leave":
                self._actors.pop(worker, None)
                return self.center.leave(worker)
            case "repeated":
                return self.center.receive(self._again(arrival))
            case "forgotten":
                self.center.ledger.arrivals += 1
                return []
        return self.center.receive(self._make_commit(arrival))

    def _make(self, rank: int, incarnation: int) -> _Actor:
        center = self.center
        exchange = _ReplayedExchange(
            self.job,
            warm_learner(self.replay.job, "cpu"),
            self._slots[rank],
            self._values_read,
            workers=center.workers,
            incarnation=incarnation,
            answer=center.answers[rank] if center.answers else None,
            home=center.homes[rank] if center.homes else None,
        )
        return _Actor(self.job.scheme, exchange, incarnation)

    def _make_commit(self, arrival: Arrival) -> Commit:
        actor = self._actors.get(arrival.worker)
        if actor is None or actor.incarnation != arrival.incarnation:
            raise _not_replayed(arrival, f"incarnation {arrival.incarnation} of this worker has not joined, or has left")
        with self._values_read.read_by(arrival), _threads(self.attempt.start["threads"]):
            actor.work_until_sent(arrival)
        commit = self._slots[arrival.worker].get_commit()
        if self.center.homes:
            commit.value = self.center.homes[arrival.worker]
        for name in ("sequence", "steps", "batches", "version", "saw", "pulls"):
            mine, recorded = getattr(commit, name), getattr(arrival, name)
            if mine != recorded:
                raise _not_replayed(arrival, f"its {name} would be {mine}, but {recorded} in the record")
        commit.seconds = arrival.seconds
        return commit

    def _again(self, arrival: Arrival) -> Commit:
        # The center reads only the sender of a repeated commit.
        lo, hi = self.center.part(0)
        value = self.center.value.new_zeros(hi - lo)
        return Commit(arrival.worker, arrival.sequence, 0, value, 0, incarnation=arrival.incarnation)

    def _deliver(self, replies: list[Reply]) -> None:
        for reply in replies:
            # Over a network, the residual of a codec may be lost with its worker; the record says whether it was.
            lost = self._over_network and not self.attempt.taken.get((reply.worker, -1 - reply.sequence), False)
            if lost and reply.sequence < 0:
                self.center.private.residuals.pop(reply.worker, None)
                for commit in self.center.round.of(reply.worker):
                    commit.residual = None
                reply = replace(reply, residual=None)
            self._slots[reply.worker].put_reply(reply)

    def _missing(self, number: int, *, last: bool) -> None:
        """Handle an arrival that is not in the record: a killed run ends in the middle of a round, else there is a gap."""
        attempt, history = self.attempt, self.replay.history
        later = {arrival.clock for n, arrival in attempt.arrivals.items() if n > number and arrival.clock is not None}
        if last and history.ended is None and later <= {attempt.clock} and self.center.clock == attempt.clock - 1:
            self.replay.notes.append(
                f"The record was cut off in the middle of update {attempt.clock}: the replay ends before it."
            )
            return
        why = f"; {history.left_out} lines were left out when the disk was full" if history.left_out else ""
        raise UsageError(
            f"The record has a gap: arrival {number} at the center is missing{why}. The run cannot be repeated beyond update "
            f"{self.center.clock}."
        )

    # -- observers of the center -----------------------------------------------------------------------------

    def _applied(self, commit: Commit) -> None:
        arrival = self.attempt.arrivals[commit.arrived]
        if arrival.clock != self.center.clock:
            recorded = "not applied" if arrival.clock is None else f"part of update {arrival.clock}"
            raise _not_replayed(arrival, f"it would be part of update {self.center.clock}, but was {recorded} in the record")
        self.replay.commits += 1
        if self.replay.strayed is None and arrival.loss is not None and abs(commit.loss - arrival.loss) > 1e-6:
            self.replay.strayed = arrival
        self._report_update()

    def _refused(self, commit: Commit, why: str) -> None:
        arrival = self.attempt.arrivals[commit.arrived]
        if arrival.why != why:
            raise _not_replayed(arrival, f"it would be rejected ({why}), but was not rejected for that in the record")

    def _repeated(self, commit: Commit, arrived: int) -> None:
        arrival = self.attempt.arrivals[arrived]
        if arrival.kind != "repeated":
            raise _not_replayed(arrival, "it would be a repeated commit, but was a new one in the record")

    def _report_update(self) -> None:
        if self.center.clock != self._clock:
            self._clock = self.center.clock
            self._values_read.keep(self.center)
            self.replay.updated(self.center)


class _ReplayedExchange(Exchange):
    """A worker's exchange in this process, which stops at every commit until it is due."""

    arrival: Arrival | None = None
    """Next commit of the worker."""

    def send(self, commit: Commit) -> Wait:  # type: ignore[override]
        super().send(commit)
        return WAIT

    def receive(self) -> Reply | Wait:  # type: ignore[override]
        if self.arrival is None:
            return WAIT
        if not self.is_answered:
            raise _not_replayed(self.arrival, "the center would not have answered this worker yet")
        return super().receive()


class _Actor:
    """One worker between two of its commits."""

    def __init__(self, scheme: Scheme, exchange: _ReplayedExchange, incarnation: int) -> None:
        self.incarnation = incarnation
        self._exchange = exchange
        self._steps = 0
        self._driver = Driver(work(self._as_recorded(scheme), exchange.me, incarnation=incarnation), exchange)
        self._driver.go_on()

    def work_until_sent(self, arrival: Arrival) -> None:
        """Continue until the next commit is in the slot."""
        exchange = self._exchange
        self._steps, exchange.arrival = arrival.steps, arrival
        joins = self._driver.request == JOIN
        if not self._driver.go_on(exchange.receive() if joins else None):  # type: ignore[arg-type]
            raise _not_replayed(arrival, "this worker would have had no rows left")

    def _as_recorded(self, scheme: Scheme) -> Scheme:
        """Return a scheme that ends windows early at the recorded steps, because the reason may have been a queue."""
        if not scheme.early:
            return scheme

        def go_on(me: Replica) -> bool:
            scheme.go_on(me)  # it may also update slots
            return me.steps < self._steps

        mine = copy.copy(scheme)
        object.__setattr__(mine, "go_on", go_on)
        return mine


class _CenterValues:
    """Values of the center by clock, kept while a later commit needs them."""

    def __init__(self, attempt: Attempt, *, pulled_answers: bool) -> None:
        self._pulled_answers = pulled_answers
        self._values: dict[int, Vector] = {}
        self._due: list[int] = []
        self._arrival: Arrival | None = None
        last: dict[int, int] = {}
        for number, arrival in sorted(attempt.arrivals.items()):
            last.update(dict.fromkeys(self._read(arrival), number))
        self._wanted = set(last)
        self._until: dict[int, list[int]] = defaultdict(list)
        for clock, number in last.items():
            self._until[number].append(clock)

    def _read(self, arrival: Arrival) -> list[int]:
        """Return the clocks that a worker read before a commit, in order."""
        if arrival.kind != "commit":
            return []
        return [*([arrival.saw] if self._pulled_answers else []), *arrival.pulls]

    def keep(self, center: Center) -> None:
        """Copy the center after an update, if a later commit needs it."""
        if center.clock in self._wanted:
            self._values[center.clock] = center.value.clone()

    def forget(self, number: int) -> None:
        """Drop the values that no arrival after this one needs."""
        for clock in self._until.pop(number, ()):
            self._values.pop(clock, None)

    @contextlib.contextmanager
    def read_by(self, arrival: Arrival) -> Iterator[None]:
        """Inside ``with``, a worker reads the centers that it read before this commit."""
        self._arrival, self._due = arrival, self._read(arrival)
        yield
        if self._due:
            raise _not_replayed(arrival, f"it would not read the center at update {self._due[0]}, but did in the record")

    def pull(self, value: Vector) -> int:
        """Copy the next center that the worker read."""
        assert self._arrival is not None
        if not self._due:
            raise _not_replayed(self._arrival, "it would read the center once more than in the record")
        clock = self._due.pop(0)
        if clock not in self._values:
            raise _not_replayed(self._arrival, f"it read the center at update {clock}, which has not been made")
        value.copy_(self._values[clock])
        return clock

    @property
    def live_value(self) -> Vector:
        """Only for schemes whose workers share the center, which cannot be replayed."""
        raise NotImplementedError


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    """Use the number of threads that a worker had, because the order of sums of floats depends on it."""
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def _not_replayed(arrival: Arrival, how: str) -> NotReplayed:
    return NotReplayed(f"At arrival {arrival.number} ({arrival}) the replay differs from the record: {how.rstrip('.')}.")
