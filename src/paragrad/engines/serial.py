"""All workers in this process, one request at a time, in an order that is given: what the laws are checked with."""

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
"""Which of the workers that can go on does so next."""


def in_turn(ready: list[int]) -> int:
    """The one that has been ready longest."""
    return ready[0]


@dataclass
class _Actor(Ports):
    """One worker, its requests answered at once or, where they are a matter of waiting, later."""

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
        return self.serial.window(self, request)

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
        """The optimisers of these problems have no state that could be NaN."""

    def restore(self, optimizer: WorkerState) -> None:
        load_marked(self.learner, optimizer)

    def keep(self) -> None:
        """Commits bring private state, where it is wanted."""


@dataclass
class Serial:
    """Workers and center in one process, without time: the same loop, the same center, any order."""

    job: Job
    workers: int
    choose: Chooser = in_turn
    stolen: bool = False
    brings: bool = False
    """Whether commits bring along what their workers keep to themselves."""
    applied: list[Commit] = field(default_factory=list)
    meddled: list[str] = field(default_factory=list)
    """What was written to although it was only lent: a commit's value, an answer."""
    steps_run: int = 0
    ready: list[int] = field(default_factory=list)
    """The workers that can go on, the one that has waited longest first."""

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
        self.center.applied = self._note
        self._started = False
        self._lent: dict[int, list[tuple[Vector, Vector]]] = {}
        """Vectors of each worker's last commit, and copies of them."""
        self.actors = [self._make(rank) for rank in range(self.workers)]

    def _note(self, commit: Commit) -> None:
        self.applied.append(changed(commit, value=commit.value.clone()))

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
        """Go on until no rows are left, or until so many commits have been applied."""
        if not self._started:
            self.start()
        while self.ready and (commits is None or len(self.applied) < commits):
            self.step(self.choose(list(self.ready)))
        return self.center

    def start(self) -> None:
        """Everyone joins, in order of rank."""
        self._started = True
        replies: list[Reply] = []
        for rank in range(self.workers):
            replies += self.center.join(rank)
        self.deliver(replies)

    def step(self, rank: int) -> None:
        """Let one worker go on until its next exchange has been made."""
        self.ready.remove(rank)
        actor = self.actors[rank]
        waits_for_reply = actor.driver.request in (JOIN, RECEIVE)
        actor.driver.go_on(actor.receive() if waits_for_reply else None)  # type: ignore[arg-type]

    def crash(self, rank: int) -> None:
        """The worker is gone with all it had not sent; a replacement joins."""
        if rank in self.ready:
            self.ready.remove(rank)
        self.actors[rank] = self._make(rank, self.actors[rank].incarnation + 1)
        self.deliver(self.center.join(rank, self.actors[rank].incarnation))

    def leave(self, rank: int) -> None:
        """The worker is gone for good."""
        if rank in self.ready:
            self.ready.remove(rank)
        self.actors[rank].driver.request = None
        self.deliver(self.center.leave(rank))

    def window(self, actor: _Actor, request: Window) -> Done:
        """Run a window of one worker."""
        self.steps_run += len(request.batches)
        done = run_window(self.job.scheme, actor.me, actor.learner, self.job.train, self.job.plan, request)
        done.seconds = float(done.steps)  # no clock: a step takes a second, so that two runs are the same
        return done

    def receive(self, actor: _Actor, commit: Commit) -> None:
        """Let the center receive a commit, and look whether anything was written to that was only lent."""
        also = {name: vector.clone() for name, vector in commit.also.items()}
        learner = actor.learner
        sent = actor.sent = changed(
            commit, value=commit.value.clone(), also=also, buffers=learner.buffers.clone(), integers=learner.integers.clone()
        )
        if self.brings:
            sent.state = self.state_of(actor)
        if actor.given is not None and not same(*actor.given):
            self.meddled.append(f"worker {commit.worker} wrote into the answer it was given")
        self._lent[commit.worker] = [(sent.value, sent.value.clone()), *((v, v.clone()) for v in also.values())]
        self.deliver(self.center.receive(sent))
        for worker, vectors in self._lent.items():
            if any(not same(now, before) for now, before in vectors):
                self.meddled.append(f"applying wrote into the value of worker {worker}'s commit")
                self._lent[worker] = []

    def state_of(self, actor: _Actor) -> WorkerState:
        """Return a worker's private state, as it is when a commit leaves."""
        return actor.me.state(self.job.scheme.adopts_from, marked(actor.learner, actor.learner.state()))

    def deliver(self, replies: list[Reply]) -> None:
        """Hand out what the center answered."""
        for reply in replies:
            actor = self.actors[reply.worker]
            value = reply.value if is_shared(self.job.scheme) else reply.value.clone()
            actor.reply = changed(reply.with_own_buffers(), value=value)
            actor.given = None if is_shared(self.job.scheme) else (value, value.clone())
            if reply.worker not in self.ready:
                self.ready.append(reply.worker)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two vectors are equal to the bit; NaN equals NaN."""
    return a.shape == b.shape and bool(torch.equal(a, b) or torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
