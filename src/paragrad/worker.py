"""The worker's loop, once, with no I/O of its own: it asks its engine for what it needs, and the engine answers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from paragrad import kernels
from paragrad.codecs.feedback import Coded
from paragrad.data.plan import Plan
from paragrad.data.source import Source, batch_at
from paragrad.learners.learner import Learner
from paragrad.replica import Replica
from paragrad.schemes.scheme import Scheme
from paragrad.types import Batches, Commit, Done, Paced, Reply, Vector

DRAWN, DRAWN_WORKERS = 16, 64
"""Parameters, and workers, up to which a model's path is kept in the record, to be drawn."""


@dataclass(frozen=True, slots=True)
class Join:
    """Ask for the first reply: the center, and the lease of the first window."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """Move the weights to a random point of this worker's own."""


@dataclass(frozen=True, slots=True)
class Recover:
    """The weights are not finite: forget the local optimiser's state, which is not either."""


class Window(NamedTuple):
    """Run local steps (or take a gradient) on these mini-batches."""

    batches: Batches
    anew: bool = True
    """Begin from the replica's weights; False: go on from where the last piece ended."""
    progress: float = 0.0
    """Share of the run's mini-batches that the center had applied, as the worker last heard."""
    ahead: int = 0
    """Steps that the worker has made and that are not in it."""

    def progress_at(self, step: int, positions: int) -> float:
        """The share at a step of this piece, the worker's own steps since it heard included."""
        return min(1.0, (round(self.progress * positions) + self.ahead + step) / positions)


@dataclass(frozen=True, slots=True)
class Pull:
    """Read the center as it is now, and its clock."""


@dataclass(frozen=True, slots=True)
class Send:
    """Commit; the engine adds what is the learner's own (buffers)."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the answer to the last commit."""


Request: TypeAlias = Join | Scatter | Recover | Window | Pull | Send | Receive


def is_drawn(parameters: int, workers: int) -> bool:
    """Whether a picture of a run's path could be drawn, so that the record keeps it."""
    return parameters <= DRAWN and workers <= DRAWN_WORKERS


@dataclass(frozen=True, slots=True)
class Pulled:
    """The center as it was read."""

    value: Vector
    clock: int


Answer: TypeAlias = Reply | Done | Pulled | None


def work(scheme: Scheme, me: Replica, *, incarnation: int = 0, distances: bool = False) -> Generator[Request, Answer, None]:
    """Pull; then again and again: a window of local steps, a commit, its answer."""
    reply = yield Join()
    assert isinstance(reply, Reply)
    me.begin_again(reply.value, reply.version)
    early, fetch, fresh, slotted = scheme.early, scheme.fetch, scheme.fresh, bool(me.slots)
    drawn = is_drawn(me.local.numel(), me.workers) and not scheme.aliased
    measured = Odometer(reply.value) if distances and scheme.answers == "center" and not scheme.aliased else None
    if scheme.apart and reply.last == 0:  # a replacement, or a resumed worker, begins from the center like any other
        yield Scatter()
    if me.feedback is not None:
        me.feedback.begin(reply.residual)
    leased, last, adopted = list(reply.batches), reply.last, reply.version
    window, used, pulls, ahead = Done(), list[int](), list[int](), 0
    while not reply.done or leased:
        scheme.begin(me)
        began = tuple((me.anchor if used else me.local).tolist()) if drawn else None
        me.steps = window.steps
        anew, whole = True, bool(used)  # what was computed in flight is a window, however short: it began from other weights
        while leased and not whole and window.steps < max(reply.steps, 1):
            count = 1 if early else reply.steps - window.steps
            if fetch is not None:
                if used and me.total % fetch == 0:
                    me.center = (yield from _pull(pulls)).value
                    scheme.pulled(me)
                    anew = True
                count = min(count, fetch - me.total % fetch)
            taken = tuple(leased[:count])
            done = yield Window(taken, anew=anew, progress=reply.progress, ahead=ahead)
            anew = False
            assert isinstance(done, Done)
            del leased[:count]
            used += taken
            if window.steps:
                window.add(done)
            else:
                window = done
            me.total += done.steps
            ahead += done.steps
            me.steps, me.lr, me.moved, me.busy = window.steps, done.lr, done.moved, done.busy
            if early and not scheme.go_on(me):
                break
        if not used:
            return
        pulled: Pulled | None = None
        if fresh:
            pulled = yield from _pull(pulls)
            me.center = pulled.value
        last += 1
        before = {name: slot.clone() for name, slot in me.slots.items()} if slotted else {}
        commit = _commit(scheme, me, window, used, incarnation=incarnation, sequence=last)
        commit.pulls, commit.saw = tuple(pulls), reply.version
        if measured is not None:
            commit.distance = measured.moved
        if began is not None:
            commit.path = began, tuple(me.local.tolist())
        yield Send(commit)
        window, used, pulls = Done(), [], []
        if scheme.overlap and leased:
            # A gradient moves nothing, so that there is nothing to tell apart later.
            me.at_send = me.local if scheme.ships == "gradient" else me.local.clone()
            taken = tuple(leased[: max(reply.steps, 1)])
            done = yield Window(taken, progress=reply.progress, ahead=ahead)
            assert isinstance(done, Done)
            del leased[: len(taken)]
            window, used = done, list(taken)
            me.total += done.steps
            me.lr = done.lr
        reply = yield Receive()
        assert isinstance(reply, Reply)
        if measured is not None:
            measured.look(reply.value, ahead=bool(used) and reply.applied)
        if reply.applied:
            me.commits += 1
            if me.feedback is not None:
                me.feedback.settle()
            if scheme.adopt(me, reply) is not False:
                # Who pulled before the commit has seen the center as it was then, and what itself added to it.
                seen = pulled.clock + 1 if pulled is not None else reply.version
                # A window that was computed while the commit was in flight began from what was adopted before.
                me.version, adopted = (adopted if used else seen), seen
            if leased or used:
                # An answer that is given again, after the first was lost, names all that the worker holds.
                leased += [position for position in reply.batches if position not in leased and position not in used]
            else:
                leased += reply.batches
        else:
            me.slots.update(before)
            if not kernels.finite(me.local):
                yield Recover()
            me.begin_again(reply.value, reply.version)
            adopted = reply.version
            window, used, leased = Done(), [], list(reply.batches)
        me.at_send, ahead = None, window.steps


class Odometer:
    """How far the center moves from what a window began from to its answer: staleness as a distance."""

    def __init__(self, center: Vector) -> None:
        self._began = self._last = center.clone()
        self.moved = math.nan

    def look(self, center: Vector, *, ahead: bool) -> None:
        """Another answer; ``ahead``: the next window was begun before it."""
        self.moved = float(torch.linalg.vector_norm(center - self._began))
        before, self._last = self._last, center.clone()
        self._began = before if ahead else self._last


def _pull(pulls: list[int]) -> Generator[Request, Answer, Pulled]:
    pulled = yield Pull()
    assert isinstance(pulled, Pulled)
    pulls.append(pulled.clock)
    return pulled


def _commit(scheme: Scheme, me: Replica, window: Done, used: list[int], *, incarnation: int, sequence: int) -> Commit:
    # In a round all commit the same fragment; alone, each worker its own next one.
    parts, sends = scheme.parts, scheme.sends
    part = 0 if parts == 1 else (me.version if scheme.quorum(me.workers) > 1 else me.commits) % parts
    vectors = torch.empty(0, dtype=me.local.dtype) if scheme.aliased else scheme.commit(me)
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
        seconds=window.seconds,
        part=part,
    )
    if coded is not None:
        commit.coded, commit.coded_bytes, commit.residual = coded.tensors, coded.bytes, coded.residual
    return commit


def run_window(scheme: Scheme, me: Replica, learner: Learner, source: Source, plan: Plan, request: Window) -> Done:
    """Answer a ``Window`` with one learner: its local steps, or the mean gradient into ``me.gradient``."""
    done = Done(lr=learner.lr)
    paced = learner if isinstance(learner, Paced) else None
    began = time.perf_counter()
    coarse = learner.spread() if request.anew or scheme.early else False
    if coarse and request.anew:
        # The model holds the weights in a coarser type than the center: the window begins from what it holds.
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
    done.seconds = time.perf_counter() - began
    return done


def progress_of(scheme: Scheme, request: Window, step: int, plan: Plan) -> float:
    """The share of the run at a step of a window, for learning-rate schedules."""
    if scheme.plain_sgd:  # its equation has one rate for all steps of a commit
        return request.progress
    return request.progress_at(step, plan.positions)


def seed_everything(seed: int) -> None:
    """Seed the generators that models and datasets draw from."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
