"""A run on a virtual cluster: events in order of virtual time, windows computed lazily and together.

What makes it exact: a window is closed when it begins (weights, optimiser, rows and length are fixed then) and is
computed before it ends; events are ordered by (time, worker, phase), so that what a worker does at one instant stays
together; every random number is keyed by what it is for, not by when it is drawn.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as changed
from enum import IntEnum
from typing import Any

import torch

from paragrad.center import Center
from paragrad.cluster import Cluster, Crash, Join, Leave, Lives
from paragrad.engines.crowd import Crowd, Due
from paragrad.engines.life import Life
from paragrad.engines.pace import Pace
from paragrad.engines.toll import Toll
from paragrad.engines.wire import Wire
from paragrad.errors import UsageError
from paragrad.job import Job
from paragrad.learners.learner import Learner
from paragrad.replica import Replica, Untrained
from paragrad.session import EVALUATION_SHARE, Session
from paragrad.types import Commit, Reply, Vector
from paragrad.worker import Answer, Pull, Pulled, Receive, Recover, Scatter, Send, Window, work
from paragrad.worker import Join as AskToJoin

WAITING = Receive, AskToJoin
"""What a worker asks for that can go on once it is answered."""
FORWARD_SHARE = 3
"""A training step on a row costs about so many times what looking at it costs."""


class Phase(IntEnum):
    """What comes first where a worker has several events at one instant."""

    GONE = 0
    GIVEN_UP = 1
    COMES = 2
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
    crowd: Crowd
    workers: int
    cluster: Cluster
    early_moment: Callable[[], bool] | None = None
    """Asked at each window's beginning whether to compute all that is due now: it makes no difference but for rounding."""
    now: float = 0.0
    lives: list[Life] = field(default_factory=list)

    def __post_init__(self) -> None:
        job, plan = self.job, self.job.plan
        shards, device = self.session.run.shards, str(self.crowd.device)
        self.center = job.make_center(self.learner, workers=self.workers, shards=shards, allocate=self._allocate, device=device)
        self.wire = Wire(self.cluster)
        self.toll = Toll.of(self.workers)
        self._heap: list[tuple[float, int, Phase, int, Any]] = []
        self._number = 0
        self._due: list[Due] = []
        self._paces = [Pace(self.cluster, rank, plan.seed) for rank in range(self.workers)]
        self._churn: list[Lives | None] = [self.cluster.lives(rank, plan.seed) for rank in range(self.workers)]
        self._lent = (-1, torch.empty(0))
        self._busy_until = 0.0
        self._queued = 0
        self._evaluator: Learner | None = None
        self._sizes: dict[int, int] = {}
        self._stateless = not (self.learner.buffers.numel() or self.learner.integers.numel())
        if self.wire.free and job.by_reference(self.center):
            self.center.homes = [self.crowd.weights(rank) for rank in range(self.workers)]
        state = self.center.state
        self._besides = sum(v.numel() * v.element_size() for v in (state.buffers, state.integers))
        self._size = sum(v.numel() * v.element_size() for v in (state.value, state.buffers, state.integers))

    def _allocate(self, name: str, length: int, dtype: torch.dtype) -> Vector:
        # Clock and ledger are read at every commit, and by this process alone.
        counters = name == "control" or name.startswith("numbers")
        return torch.zeros(length, dtype=dtype, device="cpu" if counters else self.crowd.device)

    # -- the run --------------------------------------------------------------------------------------------

    def run(self) -> Center:
        """Until no rows are left, or a stop is asked for."""
        session, center = self.session, self.center
        session.use_clock(lambda: self.now)
        if self.job.validation is not None:
            session.rows_between_looks = len(self.job.validation) * EVALUATION_SHARE // FORWARD_SHARE
        self.crowd.warm_up()
        session.attach(center)
        self.now = session.seconds
        self.lives = [self._born(rank, 0) for rank in range(self.workers)]
        session.go()
        self._schedule_faults()
        self._answer(self._gather())
        # What would happen after the last commit is no part of the run: its time ends there.
        limit = math.inf if session.run.stop.seconds is None else self.now + session.run.stop.seconds
        heap = self._heap
        while heap and session.stopped is None and not self._finished:
            if heap[0][0] > limit:
                self.now = limit
                session.stop("seconds")
            else:
                self._next()
        if session.stopped is None and not self._finished:
            raise UsageError(
                f"At {self.now:.6g} virtual seconds the cluster has no worker left, with {center.progress:.0%} of the rows "
                "done: let one of them stay, or join again."
            )
        session.end()
        session.measured |= self._summary()
        return center

    @property
    def _finished(self) -> bool:
        return self.center.leases.used == self.center.leases.total

    def _gather(self) -> list[Reply]:
        """Those who are there join; who is not has left its rows to them, until it comes."""
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

    def _summary(self) -> dict[str, Any]:
        return {"virtual": True, "wall_seconds": round(self.session.wall_seconds, 4), "cluster": self.toll.summary()}

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
            case Phase.GONE:
                self._gone(rank, what)
            case Phase.GIVEN_UP:
                if what is self.lives[rank] and not what.alive:
                    self._answer(self.center.leave(rank))
            case Phase.COMES:
                self._comes(rank)

    def _push(self, time: float, rank: int, phase: Phase, what: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (time, rank, phase, self._number, what))

    # -- a worker's loop ------------------------------------------------------------------------------------

    def _born(self, rank: int, incarnation: int) -> Life:
        scheme, crowd = self.job.scheme, self.crowd
        weights = crowd.weights(rank)
        by_reference = bool(self.center.homes)
        me = Replica(
            weights,
            rank=rank,
            workers=self.workers,
            slots=scheme.worker_slots,
            out=weights if by_reference else crowd.out(rank),
        )
        me.by_reference = by_reference
        me.feedback = self.job.feedback(weights)
        loop = work(scheme, me, incarnation=incarnation, distances=self.job.distances)
        untrained = Untrained(crowd.buffers(rank), crowd.integers(rank))
        life = Life(rank, incarnation, me, untrained, loop, waits_for=-1 - incarnation, waiting_since=self.now)
        life.request = next(loop)
        return life

    def _drive(self, life: Life, answer: Answer) -> None:
        """Let a worker's loop go on until it waits for something."""
        try:
            while True:
                request = life.request = life.loop.send(answer)
                answer = None
                match request:
                    case Window():
                        self._begin_window(life, request)
                        return
                    case Send():
                        self._send(life, request.commit)
                    case Receive() | AskToJoin():
                        if life.reply is None:
                            life.waiting_since = self.now
                            return
                        answer, life.reply = life.reply, None
                        self._adopt_untrained(life, answer)
                    case Pull():
                        if not self.wire.free:
                            life.waiting_since = self.now
                            self._ask_for_center(life)
                            return
                        answer = Pulled(self._lend(), self.center.clock)
                        self.toll.down[life.rank] += self._size
                    case Recover():
                        self.crowd.recover(life.rank)
                    case Scatter():
                        self.crowd.scatter(life.rank)
        except StopIteration:
            life.request = None

    def _begin_window(self, life: Life, request: Window) -> None:
        life.due = Due(life.me, request)
        life.began = self.now
        self._due.append(life.due)
        self._push(self._paces[life.rank].end_of(len(request.batches), self.now), life.rank, Phase.WINDOW, life)
        if self.early_moment is not None and self.early_moment():
            self._compute()

    def _window_ended(self, life: Life) -> None:
        due = life.due
        assert due is not None
        if due.done is None:
            self._compute()
        done = due.done
        assert done is not None
        life.due = None
        done.seconds = self.now - life.began
        done.busy = self._queued > 0
        self.toll.computing[life.rank] += done.seconds
        self._drive(life, done)

    def _compute(self) -> None:
        """All windows that have begun and are not computed yet, at once."""
        due, self._due = self._due, []
        self.crowd.compute(due)

    # -- messages -------------------------------------------------------------------------------------------

    def _send(self, life: Life, commit: Commit) -> None:
        rank = life.rank
        if not self._stateless:
            commit.buffers = self.crowd.buffers(rank).clone()
            commit.integers = self.crowd.integers(rank).clone()
            if self.job.scheme.overlap:
                life.untrained.sent()
        life.waits_for = commit.sequence
        self.toll.up[rank] += self._bytes(commit)
        if self.wire.free:
            # Its worker waits for the answer, so that nothing changes what it has sent; but for one that goes on meanwhile.
            self._receive(commit.copied() if self.job.scheme.overlap else commit)
            return
        life.sent = commit.copied()
        self._transmit(life, life.sent)

    def _bytes(self, commit: Commit) -> int:
        """What a commit weighs: always the same, but for fragments that do not divide evenly, and for what is coded."""
        if commit.coded_bytes is not None:
            return commit.coded_bytes + self._besides
        size = self._sizes.get(commit.part)
        if size is None:
            vectors = [commit.value, *commit.also.values()]
            vectors += [vector for vector in (commit.buffers, commit.integers) if vector is not None]
            size = self._sizes[commit.part] = sum(vector.numel() * vector.element_size() for vector in vectors)
        return size

    def _transmit(self, life: Life, commit: Commit) -> None:
        pace = self._paces[life.rank]
        for arrival in self.wire.up(life.rank, pace.delays, self._bytes(commit), self.now):
            self._push(arrival, life.rank, Phase.COMMIT, commit)

    def _commit_arrived(self, commit: Commit) -> None:
        """The center serves one commit after another; those that wait are lost where it goes down."""
        if self.cluster.center_rate is None:
            self._receive(commit)
            return
        served = max(self.now, self._busy_until) + 1.0 / self.cluster.center_rate
        if self.wire.lost_in_queue(self.now, served):
            again = self.wire.heard(served + self.cluster.retry)
            self._push(again, commit.worker, Phase.COMMIT, commit)
            return
        self._busy_until = served
        self._queued += 1
        self._push(served, commit.worker, Phase.APPLY, commit)

    def _receive(self, commit: Commit) -> None:
        replies = self.center.receive(commit)
        self._answer(replies)
        self._look()

    def _answer(self, replies: list[Reply]) -> None:
        """Send out what the center answers."""
        for reply in replies:
            life = self.lives[reply.worker]
            self.toll.down[reply.worker] += self._size
            if self.wire.free:
                if not self.center.answers:
                    reply.value = self._lend()
                self._answered((life, reply))
                continue
            mine = changed(reply.with_own_buffers(), value=reply.value.clone())
            arrival = self.wire.down(reply.worker, self._paces[reply.worker].delays, self._size, self.now)
            if arrival is not None:
                self._push(arrival, reply.worker, Phase.ANSWER, (life, mine))
            elif life.sent is not None and reply.sequence >= 0:
                # The worker hears nothing, and asks again if it is still there then.
                self._push(self.now + self.cluster.retry, reply.worker, Phase.SEND_AGAIN, life)
            else:
                self._push(self.now + self.cluster.retry, reply.worker, Phase.ANSWER, (life, mine))

    def _lend(self) -> Vector:
        """The center as it is now, for whoever only reads it: one copy for all that ask at the same clock."""
        clock = self.center.clock
        if self._lent[0] != clock:
            self._lent = clock, self.center.value.clone()
        return self._lent[1]

    def _answered(self, what: tuple[Life, Reply]) -> None:
        life, reply = what
        if not life.alive or reply.sequence != life.waits_for or life is not self.lives[life.rank]:
            return
        awake = self._paces[life.rank].awake(self.now)
        if awake > self.now:
            self._push(awake, life.rank, Phase.ANSWER, what)
            return
        life.waits_for = -(1 << 60)
        if isinstance(life.request, WAITING):
            self._waited(life)
            self._adopt_untrained(life, reply)
            self._drive(life, reply)
        else:
            life.reply = reply if self._stateless else reply.with_own_buffers()

    def _adopt_untrained(self, life: Life, reply: Reply) -> None:
        """When the worker takes the answer, and not when it arrives: a window may be running meanwhile."""
        if not self._stateless:
            life.untrained.adopt(life.me, reply)

    def _waited(self, life: Life) -> None:
        if life.waiting_since is not None:
            self.toll.idle[life.rank] += self.now - life.waiting_since
            life.waiting_since = None

    def _ask_for_center(self, life: Life) -> None:
        for arrival in self.wire.up(life.rank, self._paces[life.rank].delays, 0, self.now)[:1]:
            self._push(arrival, life.rank, Phase.PULL, life)

    def _pull_arrived(self, life: Life) -> None:
        pulled = Pulled(self._lend(), self.center.clock)
        self.toll.down[life.rank] += self._size
        arrival = self.wire.down(life.rank, self._paces[life.rank].delays, self._size, self.now)
        if arrival is None:
            self._push(self.now + self.cluster.retry, life.rank, Phase.PULL, life)
        else:
            self._push(arrival, life.rank, Phase.PULLED, (life, pulled))

    def _pulled(self, life: Life, pulled: Pulled) -> None:
        if not life.alive:
            return
        awake = self._paces[life.rank].awake(self.now)
        if awake > self.now:
            self._push(awake, life.rank, Phase.PULLED, (life, pulled))
            return
        self._waited(life)
        self._drive(life, pulled)

    # -- looking --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self.session.attend()
        if self.job.validation is None or not self.session.validation_due():
            return
        if self._evaluator is None:
            self._evaluator = self.job.make_learner(str(self.crowd.device))
        learner = self._evaluator
        learner.weights.copy_(self.center.value)
        learner.buffers.copy_(self.center.state.buffers)
        learner.integers.copy_(self.center.state.integers)
        self.session.validated(learner.evaluate(self.job.validation, self.job.evaluation_batch), self.center.clock, 0.0)

    # -- coming and going -----------------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        for fault in self.cluster.faults:
            if isinstance(fault, Crash | Leave | Join) and fault.at >= self.now:
                phase = Phase.COMES if isinstance(fault, Join) else Phase.GONE
                self._push(fault.at, fault.worker, phase, fault)

    def _expect_death(self, rank: int) -> None:
        churn = self._churn[rank]
        if churn is not None:
            at = self.now + churn.up.next()
            self._push(at, rank, Phase.GONE, (self.lives[rank], churn.down.next()))

    def _gone(self, rank: int, why: Crash | Leave | tuple[Life, float]) -> None:
        life = self.lives[rank]
        if not life.alive or life.request is None or (isinstance(why, tuple) and why[0] is not life):
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
        self._push(self.now + down, rank, Phase.COMES, None)

    def _comes(self, rank: int) -> None:
        before = self.lives[rank]
        if before.alive:
            return
        incarnation = before.incarnation + 1
        self.crowd.begin_anew(rank)
        self._paces[rank].begin(incarnation)
        self.lives[rank] = self._born(rank, incarnation)
        self._expect_death(rank)
        self._answer(self.center.join(rank, incarnation))
