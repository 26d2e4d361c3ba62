"""All workers in this process, one request at a time, in an order that is given: what the laws are checked with."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from dataclasses import replace as changed

import torch

from paragrad.center import Center
from paragrad.data.leases import Leases
from paragrad.job import Job
from paragrad.learners.learner import Learner, is_aliasable
from paragrad.replica import Replica, Untrained
from paragrad.types import Commit, Reply, Vector
from paragrad.worker import Answer, Join, Pull, Pulled, Receive, Recover, Request, Scatter, Send, Window, run_window, work

Chooser = Callable[[list[int]], int]
"""Which of the workers that can go on does so next."""


def in_turn(ready: list[int]) -> int:
    """The one that has been ready longest."""
    return ready[0]


@dataclass
class _Actor:
    learner: Learner
    me: Replica
    untrained: Untrained
    loop: Generator[Request, Answer, None]
    incarnation: int = 0
    request: Request | None = None
    reply: Reply | None = None
    sent: Commit | None = None
    given: tuple[Vector, Vector] | None = None
    """The last answer, and a copy of it."""


@dataclass
class Serial:
    """Workers and center in one process, without time: the same loop, the same center, any order."""

    job: Job
    workers: int
    choose: Chooser = in_turn
    stolen: bool = False
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
        self.actors = [self._make(rank) for rank in range(self.workers)]

    def _note(self, commit: Commit) -> None:
        self.applied.append(changed(commit, value=commit.value.clone()))

    def _make(self, rank: int, incarnation: int = 0) -> _Actor:
        scheme = self.job.scheme
        learner = self.job.make_learner("cpu")
        if scheme.aliased:
            assert is_aliasable(learner)
            learner.alias(self.center.value)
        me = Replica(learner.weights, rank=rank, workers=self.workers, slots=scheme.worker_slots)
        untrained = Untrained(learner.buffers, learner.integers)
        actor = _Actor(learner, me, untrained, work(scheme, me, incarnation=incarnation), incarnation)
        actor.request = next(actor.loop)
        me.feedback = self.job.feedback(me.local)
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
        while actor.request is not None:
            request = actor.request
            if isinstance(request, Receive | Join):
                if actor.reply is None:
                    return
                answer: Answer = actor.reply
                actor.untrained.adopt(actor.me, actor.reply)
                actor.reply = None
            else:
                answer = self.answer(actor, request)
            try:
                actor.request = actor.loop.send(answer)
            except StopIteration:
                actor.request = None
            if isinstance(request, Send):
                self._send(actor, request.commit)
                if rank in self.ready:
                    return

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
        self.actors[rank].request = None
        self.deliver(self.center.leave(rank))

    def _send(self, actor: _Actor, commit: Commit) -> None:
        also = {name: vector.clone() for name, vector in commit.also.items()}
        learner = actor.learner
        actor.sent = changed(
            commit, value=commit.value.clone(), also=also, buffers=learner.buffers.clone(), integers=learner.integers.clone()
        )
        actor.untrained.sent()
        if actor.given is not None and not same(*actor.given):
            self.meddled.append(f"worker {commit.worker} wrote into the answer it was given")
        self.deliver(self.center.receive(actor.sent))
        if (
            not same(actor.sent.value, commit.value)
            and not bool(commit.value.isnan().any())
            and commit.value is not actor.me.local
        ):
            self.meddled.append(f"applying wrote into the value of worker {commit.worker}'s commit")

    def answer(self, actor: _Actor, request: Request) -> Answer:
        """Do what the worker's loop asks for, where that is not a matter of waiting."""
        match request:
            case Window():
                self.steps_run += len(request.batches)
                done = run_window(self.job.scheme, actor.me, actor.learner, self.job.train, self.job.plan, request)
                done.seconds = float(done.steps)  # no clock: a step takes a second, so that two runs are the same
                return done
            case Recover():
                return None
            case Pull():
                return Pulled(self.center.value.clone(), self.center.clock)
            case Scatter():
                self.job.scatter(actor.learner, actor.me.rank)
        return None

    def deliver(self, replies: list[Reply]) -> None:
        """Hand out what the center answered."""
        for reply in replies:
            actor = self.actors[reply.worker]
            value = reply.value if self.job.scheme.aliased else reply.value.clone()
            actor.reply = changed(reply.with_own_buffers(), value=value)
            actor.given = None if self.job.scheme.aliased else (value, value.clone())
            if reply.worker not in self.ready:
                self.ready.append(reply.worker)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit."""
    return a.shape == b.shape and bool((a == b).all())
