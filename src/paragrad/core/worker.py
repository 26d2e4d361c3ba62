"""The worker's loop, without I/O: it yields requests, and the engine's ports answer them."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from paragrad.codecs.feedback import Coded
from paragrad.core import kernels
from paragrad.core.replica import Replica
from paragrad.data.plan import Plan
from paragrad.data.seeds import seed_everything
from paragrad.data.source import Source, batch_at
from paragrad.learners.learner import Learner, Measures
from paragrad.schemes.scheme import Scheme
from paragrad.schemes.traits import is_shared, pull_every, pulls_before_commit, starts_apart
from paragrad.types import Batches, Commit, Done, Paced, Reply, Vector, WorkerState

DRAWN, DRAWN_WORKERS = 16, 64
"""Largest numbers of parameters and of workers for which the record keeps the path of the run, to draw it."""


class Wait:
    """An engine's answer to a request that cannot be answered yet."""


WAIT = Wait()


class Ports(ABC):
    """An engine's answers to the requests of a worker's loop. A method may return ``WAIT``; the engine answers later."""

    @abstractmethod
    def window(self, request: Window) -> Done | Wait:
        """Run local steps, or compute a gradient, on the mini-batches of a window."""

    @abstractmethod
    def pull(self) -> Pulled | Wait:
        """Read the current center."""

    @abstractmethod
    def send(self, commit: Commit) -> Wait | None:
        """Send a commit, with the learner's buffers, and its private state if the engine wants it."""

    @abstractmethod
    def receive(self) -> Reply | Wait:
        """Receive the reply to the last commit, or to joining."""

    @abstractmethod
    def scatter(self) -> None:
        """Move the weights to this worker's random starting point."""

    @abstractmethod
    def recover(self) -> None:
        """Reset the local optimiser: the weights are not finite, so its state may not be finite either."""

    @abstractmethod
    def restore(self, optimizer: WorkerState) -> None:
        """Load the local optimiser's state after the last applied commit of this rank."""

    @abstractmethod
    def keep(self) -> None:
        """Send this worker's private state, unless its last commit did: it was applied, and no rows are left."""


class Request(NamedTuple):
    """A request of a worker's loop: the name of a port, and its argument if it takes one."""

    port: str
    argument: Any = None

    def ask(self, ports: Ports) -> Any:
        """Return the port's answer."""
        port = getattr(ports, self.port)
        return port() if self.argument is None else port(self.argument)


JOIN, RECEIVE, PULL = Request("receive"), Request("receive"), Request("pull")


class Window(NamedTuple):
    """The argument of ``Ports.window``."""

    batches: Batches
    anew: bool = True
    """Begin from the replica's weights; False: continue where the last piece ended."""
    progress: float = 0.0
    """Share of the run's mini-batches that the center had applied, according to the last reply."""
    ahead: int = 0
    """Steps of the worker that ``progress`` does not include."""

    def progress_at(self, step: int, positions: int) -> float:
        """Return the progress at a step of this piece, with the worker's own steps since the last reply."""
        return min(1.0, (round(self.progress * positions) + self.ahead + step) / positions)


def is_drawn(parameters: int, workers: int) -> bool:
    """Return whether a run is small enough to draw its path, so that the record keeps it."""
    return parameters <= DRAWN and workers <= DRAWN_WORKERS


@dataclass(frozen=True, slots=True)
class Pulled:
    """The center as it was read."""

    value: Vector
    clock: int


Answer: TypeAlias = Reply | Done | Pulled | None


class Driver:
    """Drives one worker's loop: passes its requests to the engine's ports and sends back their answers."""

    def __init__(self, loop: Generator[Request, Answer, None], ports: Ports) -> None:
        self._loop = loop
        self._ports = ports
        self.request: Request | None = None
        """The worker's last request; None once the loop has ended."""

    def go_on(self, answer: Answer = None) -> bool:
        """Run until a port returns ``WAIT``; return False once the loop has ended. ``answer`` is for the last request."""
        while True:
            try:
                request = self.request = self._loop.send(answer)
            except StopIteration:
                self.request = None
                return False
            found = request.ask(self._ports)
            if found is WAIT:
                return True
            answer = found


def work(scheme: Scheme, me: Replica, *, incarnation: int = 0, distances: bool = False) -> Generator[Request, Answer, None]:
    """Pull the center; then repeat: a window of local steps, a commit, its reply."""
    reply = yield JOIN
    assert isinstance(reply, Reply)
    me.begin_again(reply.value, reply.version)
    early, fetch, fresh, slotted = scheme.early is not None, pull_every(scheme), pulls_before_commit(scheme), bool(me.slots)
    drawn = is_drawn(me.local.numel(), me.workers) and not is_shared(scheme)
    measured = Odometer(reply.value) if distances and scheme.answers != "own" and not is_shared(scheme) else None
    if starts_apart(scheme) and reply.last == 0:  # replacements and resumed workers begin from the center
        yield Request("scatter")
    if me.feedback is not None:
        me.feedback.begin(reply.residual)
    leased, last = list(reply.batches), reply.last
    window, used, pulls = Done(), list[int](), list[int]()
    if reply.state is not None:  # the reply counts as that to the last commit of this rank
        yield Request("restore", me.load(reply.state))
        if scheme.overlap and leased:
            window, used = yield from _go_on(me, scheme, leased, reply.steps)
        _adopt(me, scheme, reply, ahead=bool(used))
    me.untrained.adopt(me, reply)
    me.at_send, me.ahead, me.progress = None, window.steps, reply.progress
    while not reply.done or leased:
        scheme.begin(me)
        began = tuple((me.anchor if used else me.local).tolist()) if drawn else None
        me.steps = window.steps
        anew, whole = True, bool(used)  # a window that was computed in flight is not extended: it began from other weights
        while leased and not whole and window.steps < max(reply.steps, 1):
            count = 1 if early else reply.steps - window.steps
            if fetch is not None:
                if used and me.total % fetch == 0:
                    me.center = (yield from _pull(pulls)).value
                    scheme.pulled(me)
                    anew = True
                count = min(count, fetch - me.total % fetch)
            taken = tuple(leased[:count])
            done = yield Request("window", Window(taken, anew=anew, progress=me.progress, ahead=me.ahead))
            anew = False
            assert isinstance(done, Done)
            del leased[:count]
            used += taken
            if window.steps:
                window.add(done)
            else:
                window = done
            me.total += done.steps
            me.ahead += done.steps
            me.steps, me.lr, me.moved, me.busy = window.steps, done.lr, done.moved, done.busy
            if early and not scheme.go_on(me):
                break
        if not used:
            return
        if fresh:
            pulled = yield from _pull(pulls)
            me.center, me.pulled = pulled.value, pulled.clock
        last += 1
        before = {name: slot.clone() for name, slot in me.slots.items()} if slotted else {}
        commit = _commit(scheme, me, window, used, incarnation=incarnation, sequence=last)
        commit.pulls, commit.saw = tuple(pulls), reply.version
        if measured is not None:
            commit.distance = measured.moved
        if began is not None:
            commit.path = began, tuple(me.local.tolist())
        yield Request("send", commit)
        window, used, pulls = Done(), [], []
        if scheme.overlap and leased:
            me.untrained.sent()
            window, used = yield from _go_on(me, scheme, leased, reply.steps)
        reply = yield RECEIVE
        assert isinstance(reply, Reply)
        if measured is not None:
            measured.look(reply.value, ahead=bool(used) and reply.applied)
        if reply.applied:
            if reply.done and not leased and not used:
                yield Request("keep")
            if me.feedback is not None:
                me.feedback.settle()
            _adopt(me, scheme, reply, ahead=bool(used))
            if leased or used:
                # A reply that is repeated, because the first was lost, names all leased mini-batches again.
                leased += [position for position in reply.batches if position not in leased and position not in used]
            else:
                leased += reply.batches
        else:
            me.slots.update(before)
            if not kernels.finite(me.local):
                yield Request("recover")
            me.begin_again(reply.value, reply.version)
            window, used, leased = Done(), [], list(reply.batches)
        me.untrained.adopt(me, reply)
        me.at_send, me.ahead, me.progress = None, window.steps, reply.progress


def _go_on(me: Replica, scheme: Scheme, leased: list[int], steps: int) -> Generator[Request, Answer, tuple[Done, list[int]]]:
    """Compute the next window, from the worker's own weights, while its commit is in flight."""
    # A gradient does not move the weights, so there is no movement to separate later.
    me.at_send = me.local if scheme.ships == "gradient" else me.local.clone()
    taken = leased[: max(steps, 1)]
    done = yield Request("window", Window(tuple(taken), progress=me.progress, ahead=me.ahead))
    assert isinstance(done, Done)
    del leased[: len(taken)]
    me.total += done.steps
    me.lr = done.lr
    return done, taken


def _adopt(me: Replica, scheme: Scheme, reply: Reply, *, ahead: bool) -> None:
    """Adopt the reply to an applied commit; ``ahead``: the next window was computed while the commit was in flight."""
    me.commits += 1
    if scheme.adopt(me, reply) is not False:
        # A worker that pulled before the commit knows the center of that clock, plus its own commit.
        clock = reply.version if me.pulled is None else me.pulled + 1
        # A window that was computed while the commit was in flight began from the center adopted before.
        me.version, me.adopted = (me.adopted if ahead else clock), clock


def another_optimizer(rank: int) -> str:
    """Return the warning for a worker whose state in the checkpoint belongs to another optimiser."""
    return f"Worker {rank} begins with a new optimiser state: the state in the checkpoint is of another optimiser."


class Odometer:
    """Distance that the center moves between the beginning of a window and its reply: staleness as a distance."""

    def __init__(self, center: Vector) -> None:
        self._began = self._last = center.clone()
        self.moved = math.nan

    def look(self, center: Vector, *, ahead: bool) -> None:
        """Measure at a reply; ``ahead``: the next window began before it."""
        self.moved = float(torch.linalg.vector_norm(center - self._began))
        before, self._last = self._last, center.clone()
        self._began = before if ahead else self._last


def _pull(pulls: list[int]) -> Generator[Request, Answer, Pulled]:
    pulled = yield PULL
    assert isinstance(pulled, Pulled)
    pulls.append(pulled.clock)
    return pulled


def _commit(scheme: Scheme, me: Replica, window: Done, used: list[int], *, incarnation: int, sequence: int) -> Commit:
    # In a round, all workers commit the same fragment; without rounds, each commits its own next one.
    parts, sends = scheme.parts, scheme.sends
    part = 0 if parts == 1 else (me.version if scheme.quorum(me.workers) > 1 else me.commits) % parts
    vectors = torch.empty(0, dtype=me.local.dtype) if is_shared(scheme) else scheme.commit(me)
    value, *further = vectors if isinstance(vectors, tuple) else (vectors,)
    if parts > 1:
        length = value.numel()
        cut = slice(length * part // parts, length * (part + 1) // parts)
        value, further = value[cut], [vector[cut] for vector in further]
    coded: Coded | None = None
    if me.feedback is not None:
        coded = me.feedback.encode(value, me.gradient[: value.numel()], me.local.numel() * part // parts)
        value = coded.value
    me.sent = value
    commit = Commit(
        worker=me.rank,
        incarnation=incarnation,
        sequence=sequence,
        version=me.version,
        value=value,
        also=dict(zip(sends, further, strict=True)) if sends or further else {},
        steps=window.steps,
        weight=window.weight,
        rows=window.rows,
        batches=tuple(used),
        loss=window.loss / window.weight if window.weight else math.nan,
        lr=window.lr,
        gradient_norm=window.gradient_norm,
        seconds=window.seconds,
        part=part,
    )
    if coded is not None:
        commit.coded, commit.bytes, commit.residual = coded.tensors, coded.bytes, coded.residual
    return commit


def run_window(scheme: Scheme, me: Replica, learner: Learner, source: Source, plan: Plan, request: Window) -> Done:
    """Run a window with one learner: local steps, or the mean gradient into ``me.gradient``."""
    done = Done(lr=learner.lr)
    paced = learner if isinstance(learner, Paced) else None
    began = time.perf_counter()
    coarse = learner.spread() if request.anew or scheme.early else False
    if coarse and request.anew:
        # The model holds the weights in a coarser type than the center: the window begins from the rounded weights.
        if me.at_send is None:
            me.anchor = me.local.clone()
        else:
            me.at_send = me.local.clone()
    for position in request.batches:
        seed_everything(plan.seed_of(position))
        batch = batch_at(source, plan, position)
        if paced is not None:
            paced.set_progress(progress_of(scheme, request, done.steps, plan))
        if scheme.ships == "gradient":
            step = learner.gradient(batch, me.gradient, accumulate=done.weight)
        else:
            before = me.local.clone() if scheme.early else None
            step = learner.step(batch)
            if before is not None:
                learner.collect()
                done.moved = float(torch.linalg.vector_norm(me.local - before))
        done.steps += 1
        done.rows += plan.size_of(position)
        done.weight += step.weight
        done.loss += step.loss * step.weight
    learner.collect()
    done.lr = learner.lr
    if me.measures(done.steps):
        if scheme.ships == "gradient":
            done.gradient_norm = float(torch.linalg.vector_norm(me.gradient))
        elif isinstance(learner, Measures):
            done.gradient_norm = learner.gradient_norm()
    done.seconds = time.perf_counter() - began
    return done


def progress_of(scheme: Scheme, request: Window, step: int, plan: Plan) -> float:
    """Return the progress of the run at a step of a window, for learning-rate schedules."""
    if scheme.plain_sgd:  # its equation has one learning rate for all steps of a commit
        return request.progress
    return request.progress_at(step, plan.positions)
