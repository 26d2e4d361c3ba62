"""All workers in this process, one request at a time and in any given order, for checking the laws of a scheme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as changed

import torch

from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.core.replica import Replica, Untrained
from paragrad.core.worker import JOIN, RECEIVE, WAIT, Driver, Ports, Pulled, Wait, Window, run_window, work
from paragrad.data.leases import Leases
from paragrad.learners.learner import Learner, is_aliasable, load_marked, marked
from paragrad.schemes.traits import is_shared
from paragrad.types import Commit, Done, Reply, Vector, WorkerState

Chooser = Callable[[list[int]], int]
"""Chooses the next worker among those that can continue."""


def in_turn(ready: list[int]) -> int:
    """Return the worker that has been ready longest."""
    return ready[0]


@dataclass
class _Actor(Ports):
    """One worker; answers its requests at once, or later if it must wait."""

    serial: Serial
    learner: Learner
    me: Replica
    incarnation: int = 0
    driver: Driver = field(init=False)
    reply: Reply | None = None
    sent: Commit | None = None
    given: tuple[Vector, Vector] | None = None
    """The last reply's value, and a copy of it."""

    def window(self, request: Window) -> Done:
        serial, job = self.serial, self.serial.job
        serial.steps_run += len(request.batches)
        done = run_window(job.scheme, self.me, self.learner, job.train, job.plan, request)
        done.seconds = float(done.steps)  # a step takes one second, so that runs repeat
        return done

    def pull(self) -> Pulled:
        center = self.serial.center
        return Pulled(center.value.clone(), center.clock)

    def send(self, commit: Commit) -> Wait | None:
        self.serial.receive(self, commit)
        return WAIT if self.me.rank in self.serial.ready else None

    def receive(self) -> Reply | Wait:
        reply, self.reply = self.reply, None
        return WAIT if reply is None else reply

    def scatter(self) -> None:
        self.serial.job.scatter(self.learner, self.me.rank)

    def recover(self) -> None:
        """Do nothing: the optimisers of these problems have no state that could be NaN."""

    def restore(self, optimizer: WorkerState) -> None:
        load_marked(self.learner, optimizer)

    def keep(self) -> None:
        """Do nothing: commits bring the private state."""


@dataclass
class Serial:
    """Workers and center in one process, without time: the usual loop and center, in any order."""

    job: Job
    workers: int
    choose: Chooser = in_turn
    stolen: bool = False
    brings: bool = False
    """True if commits bring the private state of their workers."""
    applied: list[Commit] = field(default_factory=list)
    meddled: list[str] = field(default_factory=list)
    """Violations: writes into vectors that must only be read, such as a commit's value or an answer."""
    steps_run: int = 0
    ready: list[int] = field(default_factory=list)
    """Workers that can continue, the one that has waited longest first."""

    def __post_init__(self) -> None:
        learner = self.job.make_learner("cpu")
        plan, scheme = self.job.plan, self.job.scheme
        self.center = Center(
            scheme,
            learner.weights.clone(),
            workers=self.workers,
            leases=Leases(batches=plan.batches, epochs=plan.epochs, workers=self.workers, stolen=self.stolen),
            buffers=learner.buffers.clone(),
            integers=learner.integers.clone(),
            optimizer=self.job.center_optimizer(learner),
        )
        self.job.follow(self.center)
        self.center.applied = lambda commit: self.applied.append(changed(commit, value=commit.value.clone()))
        self._started = False
        self._lent: dict[int, list[tuple[Vector, Vector]]] = {}
        """Vectors of each worker's last commit, each with a copy."""
        self.actors = [self._make(rank) for rank in range(self.workers)]

    def _make(self, rank: int, incarnation: int = 0) -> _Actor:
        scheme = self.job.scheme
        learner = self.job.make_learner("cpu")
        if is_shared(scheme):
            assert is_aliasable(learner)
            learner.alias(self.center.value)
        me = Replica(learner.weights, rank=rank, workers=self.workers, slots=scheme.worker_slots)
        me.untrained = Untrained(learner.buffers, learner.integers)
        me.feedback = self.job.feedback(me.local)
        actor = _Actor(self, learner, me, incarnation)
        actor.driver = Driver(work(scheme, me, incarnation=incarnation), actor)
        actor.driver.go_on()
        return actor

    def run(self, commits: int | None = None) -> Center:
        """Run until no rows are left, or until this many commits were applied."""
        if not self._started:
            self.start()
        while self.ready and (commits is None or len(self.applied) < commits):
            self.step(self.choose(list(self.ready)))
        return self.center

    def start(self) -> None:
        """Let all workers join, in order of rank."""
        self._started = True
        replies: list[Reply] = []
        for rank in range(self.workers):
            replies += self.center.join(rank)
        self.deliver(replies)

    def step(self, rank: int) -> None:
        """Let one worker continue until its next exchange is done."""
        self.ready.remove(rank)
        actor = self.actors[rank]
        waits_for_reply = actor.driver.request in (JOIN, RECEIVE)
        actor.driver.go_on(actor.receive() if waits_for_reply else None)  # type: ignore[arg-type]

    def crash(self, rank: int) -> None:
        """Lose a worker, with everything it has not sent; a replacement joins."""
        if rank in self.ready:
            self.ready.remove(rank)
        self.actors[rank] = self._make(rank, self.actors[rank].incarnation + 1)
        self.deliver(self.center.join(rank, self.actors[rank].incarnation))

    def leave(self, rank: int) -> None:
        """Lose a worker without a replacement."""
        if rank in self.ready:
            self.ready.remove(rank)
        self.actors[rank].driver.request = None
        self.deliver(self.center.leave(rank))

    def receive(self, actor: _Actor, commit: Commit) -> None:
        """Let the center receive a commit, and check that vectors that must only be read did not change."""
        also = {name: vector.clone() for name, vector in commit.also.items()}
        learner = actor.learner
        sent = actor.sent = changed(
            commit, value=commit.value.clone(), also=also, buffers=learner.buffers.clone(), integers=learner.integers.clone()
        )
        if self.brings:
            sent.state = actor.me.state(self.job.scheme.adopts_from, marked(learner, learner.state()))
        if actor.given is not None and not same(*actor.given):
            self.meddled.append(f"worker {commit.worker} wrote into the answer it was given")
        self._lent[commit.worker] = [(sent.value, sent.value.clone()), *((v, v.clone()) for v in also.values())]
        self.deliver(self.center.receive(sent))
        for worker, vectors in self._lent.items():
            if any(not same(now, before) for now, before in vectors):
                self.meddled.append(f"applying wrote into the value of worker {worker}'s commit")
                self._lent[worker] = []

    def deliver(self, replies: list[Reply]) -> None:
        """Hand the center's replies to the workers."""
        for reply in replies:
            actor = self.actors[reply.worker]
            value = reply.value if is_shared(self.job.scheme) else reply.value.clone()
            actor.reply = changed(reply.with_own_buffers(), value=value)
            actor.given = None if is_shared(self.job.scheme) else (value, value.clone())
            if reply.worker not in self.ready:
                self.ready.append(reply.worker)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two vectors are equal; NaN equals NaN."""
    return a.shape == b.shape and bool(torch.equal(a, b) or torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
