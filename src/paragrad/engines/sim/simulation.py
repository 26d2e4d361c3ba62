"""A run on a virtual cluster: events in order of virtual time, windows computed lazily and together.

The simulation is exact. The inputs of a window (weights, optimiser, rows and length) are fixed when it begins, and it is
computed before it ends. Events are ordered by (time, worker, phase), so that the events of one worker at one instant stay
together. Every random number is keyed by its purpose, not by the time when it is drawn.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as changed
from enum import IntEnum
from functools import cache
from typing import Any

import torch

from paragrad.cluster import Cluster, Crash, Join, Leave, Lives
from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.core.replica import Replica
from paragrad.core.worker import JOIN, RECEIVE, WAIT, Answer, Driver, Ports, Pulled, Wait, Window, another_optimizer, work
from paragrad.engines.sim.compute_time import ComputeTime
from paragrad.engines.sim.costs import Costs
from paragrad.engines.sim.incarnation import Incarnation
from paragrad.engines.sim.messages import Messages
from paragrad.engines.sim.replicas import PendingWindow, Replicas
from paragrad.errors import UsageError
from paragrad.learners.learner import Learner, Reports
from paragrad.rundir.grid import Snapshot, fill
from paragrad.rundir.session import Session
from paragrad.types import Commit, Reply, Vector, WorkerState


class Phase(IntEnum):
    """Order of the events of one worker at one instant."""

    CRASH = 0
    GIVEN_UP = 1
    JOIN = 2
    ANSWER = 3
    PULLED = 4
    WINDOW = 5
    PULL = 6
    COMMIT = 7
    APPLY = 8
    SEND_AGAIN = 9


@dataclass
class Simulation:
    """Workers, center and network under one virtual clock."""

    job: Job
    session: Session
    learner: Learner
    replicas: Replicas
    workers: int
    cluster: Cluster
    early_moment: Callable[[], bool] | None = None
    """Called when a window begins: True computes all pending windows at once. Results differ only by rounding."""
    now: float = 0.0
    lives: list[Incarnation] = field(default_factory=list)

    def __post_init__(self) -> None:
        job, plan = self.job, self.job.plan
        partition, device = self.session.run.partition, str(self.replicas.device)
        self.center = job.make_center(
            self.learner, workers=self.workers, partition=partition, allocate=self._allocate, device=device
        )
        self.messages = Messages(self.cluster)
        self.costs = Costs.of(self.workers)
        self._heap: list[tuple[float, int, Phase, int, Any]] = []
        self._number = 0
        self._due: list[PendingWindow] = []
        self._compute_times = [ComputeTime(self.cluster, rank, plan.seed) for rank in range(self.workers)]
        self._churn: list[Lives | None] = [self.cluster.lives(rank, plan.seed) for rank in range(self.workers)]
        self._lent = (-1, torch.empty(0))
        self._busy_until = 0.0
        self._queued = 0
        self._evaluator: Learner | None = None
        self._wanted = False
        """True if commits must bring private state, because a checkpoint is due."""
        self._parting = False
        """True once the run is over; a worker that has brought its private state then needs no answer."""
        self._limit = math.inf
        self._longest = 0.0
        """Longest time between two commits of a worker so far."""
        self._sizes: dict[int, int] = {}
        self._stateless = not (self.learner.buffers.numel() or self.learner.integers.numel())
        if self.messages.free and job.by_reference(self.center):
            self.center.homes = [self.replicas.weights(rank) for rank in range(self.workers)]
        state = self.center.state
        self._besides = sum(v.numel() * v.element_size() for v in (state.buffers, state.integers))
        self._size = sum(v.numel() * v.element_size() for v in (state.value, state.buffers, state.integers))

    def _allocate(self, name: str, length: int, dtype: torch.dtype) -> Vector:
        # Clock and ledger are read at every commit, and only on the CPU.
        counters = name == "control" or name.startswith("numbers")
        return torch.zeros(length, dtype=dtype, device="cpu" if counters else self.replicas.device)

    # -- the run --------------------------------------------------------------------------------------------

    def run(self) -> Center:
        """Run until no rows are left or a stop is requested, and return the center."""
        session, center = self.session, self.center
        session.time.use(lambda: self.now)
        session.snapshots.evaluate = self._evaluate
        self.replicas.warm_up()
        session.attach(center)
        session.missing = lambda: [rank for rank in center.may_bring if rank in center.live]
        session.announce = self._want
        self.now = session.seconds
        self.lives = [self._start_incarnation(rank, 0) for rank in range(self.workers)]
        session.go()
        self._schedule_faults()
        self._answer(self._gather())
        if session.run.stop.seconds is not None:
            self._limit = self.now + session.run.stop.seconds
        heap = self._heap
        # The run ends with its last commit: events after it do not count.
        while heap and session.stopped is None and not self._finished:
            if heap[0][0] > self._limit:
                self.now = self._limit
                session.stop("seconds")
            else:
                self._next()
        self._part()
        if session.stopped is None and not self._finished:
            raise UsageError(
                f"At {self.now:.6g} virtual seconds the cluster has no worker left, with {center.progress:.0%} of the rows "
                "done: let a worker stay, or join again."
            )
        session.time.end()
        summary = {"virtual": True, "wall_seconds": round(session.time.wall_seconds, 4), "cluster": self.costs.summary()}
        session.measured |= summary
        return center

    @property
    def _finished(self) -> bool:
        return self.center.leases.used == self.center.leases.total

    # -- private state --------------------------------------------------------------------------------------

    def _want(self, wanted: bool) -> None:
        self._wanted = wanted

    def _is_near_limit(self, life: Incarnation) -> bool:
        """Return whether this may be the worker's last commit before the time limit."""
        self._longest = max(self._longest, self.now - life.committed)
        life.committed = self.now
        return self.center.private.are_kept and self.now + 2 * self._longest > self._limit

    def _state_of(self, life: Incarnation) -> WorkerState:
        return life.me.state(self.job.scheme.adopts_from, self.replicas.state(life.rank))

    def _keep(self, life: Incarnation) -> None:
        """Keep the private state of a worker that has done nothing since its last applied commit."""
        if self.center.private.are_kept and life.brought != self.center.last(life.rank):
            self.center.private.keep(life.rank, self._state_of(life))

    def _part(self) -> None:
        """Collect each worker's private state after its last applied commit, so that the run can be resumed."""
        session, center = self.session, self.center
        if session.stopped not in (None, "seconds"):
            self._parting = not center.round.gathers
            for rank in center.live:  # states of an earlier checkpoint depend on the speed of this machine
                center.private.keep(rank, None)
            while self._heap and not self._finished and session.waits_for_workers():
                self._next()
        if self._finished or not self.job.scheme.overlap:  # workers that wait have not changed since their commit
            for life in self.lives:
                if life.alive and life.driver.request == RECEIVE and life.waits_for == center.last(life.rank):
                    self._keep(life)

    def _gather(self) -> list[Reply]:
        """Let present workers join; the rows of absent ones go to them until those workers join."""
        replies: list[Reply] = []
        for life in self.lives:
            life.alive = self.cluster.there(life.rank, self.now)
            if not life.alive:
                replies += self.center.leave(life.rank)
        for life in self.lives:
            if life.alive:
                replies += self.center.join(life.rank)
                self._expect_death(life.rank)
        return replies

    def _next(self) -> None:
        self.now, rank, phase, _, what = heapq.heappop(self._heap)
        match phase:
            case Phase.WINDOW:
                if what.alive:
                    self._window_ended(what)
            case Phase.COMMIT:
                self._commit_arrived(what)
            case Phase.APPLY:
                self._queued -= 1
                self._receive(what)
            case Phase.ANSWER:
                self._answered(what)
            case Phase.PULL:
                self._pull_arrived(what)
            case Phase.PULLED:
                self._pulled(*what)
            case Phase.SEND_AGAIN:
                if what.alive and what.sent is not None and what.waits_for == what.sent.sequence:
                    self._transmit(what, what.sent)
            case Phase.CRASH:
                self._on_crash(rank, what)
            case Phase.GIVEN_UP:
                if what is self.lives[rank] and not what.alive:
                    self._answer(self.center.leave(rank))
            case Phase.JOIN:
                self._on_join(rank)

    def _push(self, time: float, rank: int, phase: Phase, what: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (time, rank, phase, self._number, what))

    # -- a worker's loop ------------------------------------------------------------------------------------

    def _start_incarnation(self, rank: int, incarnation: int) -> Incarnation:
        scheme, replicas = self.job.scheme, self.replicas
        weights = replicas.weights(rank)
        by_reference = bool(self.center.homes)
        me = Replica(
            weights,
            rank=rank,
            workers=self.workers,
            slots=scheme.worker_slots,
            out=weights if by_reference else replicas.out(rank),
        )
        me.by_reference = by_reference
        me.feedback = self.job.feedback(weights)
        me.untrained = replicas.untrained(rank)
        life = Incarnation(rank, incarnation, me, waits_for=-1 - incarnation, waiting_since=self.now, committed=self.now)
        loop = work(scheme, me, incarnation=incarnation, distances=self.job.distances)
        life.driver = Driver(loop, _SimulatedPorts(self, life))
        life.driver.go_on()
        return life

    def _drive(self, life: Incarnation, answer: Answer) -> None:
        life.driver.go_on(answer)

    def _begin_window(self, life: Incarnation, request: Window) -> None:
        life.due = PendingWindow(life.me, request)
        life.began = self.now
        self._due.append(life.due)
        self._push(self._compute_times[life.rank].end_of(len(request.batches), self.now), life.rank, Phase.WINDOW, life)
        if self.early_moment is not None and self.early_moment():
            self._compute()

    def _window_ended(self, life: Incarnation) -> None:
        due = life.due
        assert due is not None
        if due.done is None:
            self._compute()
        done = due.done
        assert done is not None
        life.due = None
        done.seconds = self.now - life.began
        done.busy = self._queued > 0
        self.costs.computing[life.rank] += done.seconds
        self._drive(life, done)

    def _compute(self) -> None:
        due, self._due = self._due, []
        self.replicas.compute(due)

    # -- messages -------------------------------------------------------------------------------------------

    def _send(self, life: Incarnation, commit: Commit) -> None:
        rank = life.rank
        if not self._stateless:
            untrained = self.replicas.untrained(rank)
            commit.buffers, commit.integers = untrained.buffers.clone(), untrained.integers.clone()
        life.waits_for = commit.sequence
        if self._is_near_limit(life) or (self._wanted and self.center.private.are_kept):
            commit.state, life.brought = self._state_of(life), commit.sequence
        self.costs.up[rank] += self._bytes(commit)
        if self.messages.free:
            # The worker waits for the answer, so its vectors do not change; with overlap it continues.
            self._receive(commit.copied() if self.job.scheme.overlap else commit)
            return
        life.sent = commit.copied()
        self._transmit(life, life.sent)

    def _bytes(self, commit: Commit) -> int:
        """Return the size of a commit. It is constant, except for fragments of unequal length and coded commits."""
        if commit.bytes is not None:
            return commit.bytes + self._besides
        size = self._sizes.get(commit.part)
        if size is None:
            vectors = [commit.value, *commit.also.values()]
            vectors += [vector for vector in (commit.buffers, commit.integers) if vector is not None]
            size = self._sizes[commit.part] = sum(vector.numel() * vector.element_size() for vector in vectors)
        return size

    def _transmit(self, life: Incarnation, commit: Commit) -> None:
        pace = self._compute_times[life.rank]
        for arrival in self.messages.up(life.rank, pace.delays, self._bytes(commit), self.now):
            self._push(arrival, life.rank, Phase.COMMIT, commit)

    def _commit_arrived(self, commit: Commit) -> None:
        """Queue a commit: the center serves one after another, and loses waiting ones if it crashes."""
        if self.cluster.center_rate is None:
            self._receive(commit)
            return
        served = max(self.now, self._busy_until) + 1.0 / self.cluster.center_rate
        if self.messages.lost_in_queue(self.now, served):
            again = self.messages.received(served + self.cluster.retry)
            self._push(again, commit.worker, Phase.COMMIT, commit)
            return
        self._busy_until = served
        self._queued += 1
        self._push(served, commit.worker, Phase.APPLY, commit)

    def _receive(self, commit: Commit) -> None:
        replies = self.center.receive(commit)
        self._answer(replies)
        self.session.attend()

    def _answer(self, replies: list[Reply]) -> None:
        for reply in replies:
            life = self.lives[reply.worker]
            if self._parting and reply.sequence >= 0 and reply.worker not in self.center.may_bring:
                continue
            self.costs.down[reply.worker] += self._size
            if self.messages.free:
                if not self.center.answers:
                    reply.value = self._lend()
                self._answered((life, reply))
                continue
            mine = changed(reply.with_own_buffers(), value=reply.value.clone())
            arrival = self.messages.down(reply.worker, self._compute_times[reply.worker].delays, self._size, self.now)
            if arrival is not None:
                self._push(arrival, reply.worker, Phase.ANSWER, (life, mine))
            elif life.sent is not None and reply.sequence >= 0:
                # The worker gets no answer, and sends its commit again if it is still alive then.
                self._push(self.now + self.cluster.retry, reply.worker, Phase.SEND_AGAIN, life)
            else:
                self._push(self.now + self.cluster.retry, reply.worker, Phase.ANSWER, (life, mine))

    def _lend(self) -> Vector:
        """Return a read-only copy of the center; all that ask at the same clock get the same copy."""
        clock = self.center.clock
        if self._lent[0] != clock:
            self._lent = clock, self.center.value.clone()
        return self._lent[1]

    def _answered(self, what: tuple[Incarnation, Reply]) -> None:
        life, reply = what
        if not life.alive or reply.sequence != life.waits_for or life is not self.lives[life.rank]:
            return
        awake = self._compute_times[life.rank].awake(self.now)
        if awake > self.now:
            self._push(awake, life.rank, Phase.ANSWER, what)
            return
        life.waits_for = -(1 << 60)
        if life.driver.request in (JOIN, RECEIVE):
            self._waited(life)
            self._drive(life, reply)
        else:
            life.reply = reply if self._stateless else reply.with_own_buffers()

    def _waited(self, life: Incarnation) -> None:
        if life.waiting_since is not None:
            self.costs.idle[life.rank] += self.now - life.waiting_since
            life.waiting_since = None

    def _ask_for_center(self, life: Incarnation) -> None:
        arrival = self.messages.up(life.rank, self._compute_times[life.rank].delays, 0, self.now)[0]
        self._push(arrival, life.rank, Phase.PULL, life)

    def _pull_arrived(self, life: Incarnation) -> None:
        pulled = Pulled(self._lend(), self.center.clock)
        self.costs.down[life.rank] += self._size
        arrival = self.messages.down(life.rank, self._compute_times[life.rank].delays, self._size, self.now)
        if arrival is None:
            self._push(self.now + self.cluster.retry, life.rank, Phase.PULL, life)
        else:
            self._push(arrival, life.rank, Phase.PULLED, (life, pulled))

    def _pulled(self, life: Incarnation, pulled: Pulled) -> None:
        if not life.alive:
            return
        awake = self._compute_times[life.rank].awake(self.now)
        if awake > self.now:
            self._push(awake, life.rank, Phase.PULLED, (life, pulled))
            return
        self._waited(life)
        self._drive(life, pulled)

    # -- validation -----------------------------------------------------------------------------------------

    def _evaluate(self, snapshot: Snapshot) -> dict[str, float]:
        """Validate a snapshot of the center; takes no virtual time."""
        assert self.job.validation is not None
        if self._evaluator is None:
            self._evaluator = self.job.make_learner(str(self.replicas.device))
            if isinstance(self._evaluator, Reports):
                self._evaluator.report = cache(lambda message: self.session.emit("warning", message=message))
        learner = self._evaluator
        fill(snapshot.tensors, learner.weights, learner.buffers, learner.integers)
        return learner.evaluate(self.job.validation, self.job.evaluation_batch)

    # -- faults ---------------------------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        for fault in self.cluster.faults:
            if isinstance(fault, Crash | Leave | Join) and fault.at >= self.now:
                phase = Phase.JOIN if isinstance(fault, Join) else Phase.CRASH
                self._push(fault.at, fault.worker, phase, fault)

    def _expect_death(self, rank: int) -> None:
        churn = self._churn[rank]
        if churn is not None:
            at = self.now + churn.up.next()
            self._push(at, rank, Phase.CRASH, (self.lives[rank], churn.down.next()))

    def _on_crash(self, rank: int, why: Crash | Leave | tuple[Incarnation, float]) -> None:
        life = self.lives[rank]
        if not life.alive or life.driver.request is None or (isinstance(why, tuple) and why[0] is not life):
            return
        life.alive = False
        if life.due is not None and life.due.done is None:
            self._due.remove(life.due)
        if isinstance(why, Leave):
            self._answer(self.center.leave(rank))
            return
        down = why[1] if isinstance(why, tuple) else why.down
        self.session.emit("lost", rank=rank, incarnation=life.incarnation, reason="crash")
        if down > self.cluster.replace_after:
            self._push(self.now + self.cluster.replace_after, rank, Phase.GIVEN_UP, life)
        self._push(self.now + down, rank, Phase.JOIN, None)

    def _on_join(self, rank: int) -> None:
        before = self.lives[rank]
        if before.alive:
            return
        incarnation = before.incarnation + 1
        self.replicas.begin_anew(rank)
        self._compute_times[rank].begin(incarnation)
        self.lives[rank] = self._start_incarnation(rank, incarnation)
        self._expect_death(rank)
        self._answer(self.center.join(rank, incarnation))


class _SimulatedPorts(Ports):
    """Answers one worker's requests: windows and messages take virtual time."""

    def __init__(self, simulation: Simulation, life: Incarnation) -> None:
        self._simulation = simulation
        self._life = life

    def window(self, request: Window) -> Wait:
        self._simulation._begin_window(self._life, request)
        return WAIT

    def pull(self) -> Pulled | Wait:
        simulation, life = self._simulation, self._life
        if simulation.messages.free:
            simulation.costs.down[life.rank] += simulation._size
            return Pulled(simulation._lend(), simulation.center.clock)
        life.waiting_since = simulation.now
        simulation._ask_for_center(life)
        return WAIT

    def send(self, commit: Commit) -> None:
        self._simulation._send(self._life, commit)

    def receive(self) -> Reply | Wait:
        life = self._life
        if life.reply is None:
            life.waiting_since = self._simulation.now
            return WAIT
        reply, life.reply = life.reply, None
        return reply

    def scatter(self) -> None:
        self._simulation.replicas.scatter(self._life.rank)

    def recover(self) -> None:
        self._simulation.replicas.recover(self._life.rank)

    def restore(self, optimizer: WorkerState) -> None:
        if not self._simulation.replicas.load(self._life.rank, optimizer):
            self._simulation.session.emit("warning", message=another_optimizer(self._life.rank))

    def keep(self) -> None:
        self._simulation._keep(self._life)
