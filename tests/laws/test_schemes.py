"""The laws of the schemes: the table of all of them, and the laws between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paragrad as pg
from paragrad.core.job import Job
from paragrad.core.replica import Replica
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial
from paragrad.laws.bowl import Bowl
from paragrad.laws.scheme import LawBroken
from paragrad.learners.torch import TorchLearner
from paragrad.types import CenterView, Commit, Reply, Vector
from tests.laws.table import TABLE, Holding


@pytest.mark.parametrize(("scheme", "plain"), TABLE, ids=lambda value: repr(value))
def test_every_scheme_obeys_the_laws(scheme, plain):
    pg.check_scheme(scheme, plain=plain)


# -- check_scheme can fail ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean(pg.Scheme):
    """c <- c + d / 2"""

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        for commit in commits:
            center.value += commit.value / 2
        return center.value


@dataclass(frozen=True)
class Aliasing(Mean):
    """An anchor that is the weights themselves: every commit is silently zero."""

    def adopt(self, me: Replica, reply: Reply) -> None:
        me.local = reply.value
        me.anchor = me.local


@dataclass(frozen=True)
class FalselyElementwise(Mean):
    """Normalises by the length of the whole vector, but says that it works in blocks."""

    elementwise = True

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        for commit in commits:
            center.add(commit.value / (1 + commit.value.norm()))
        return center.value


@dataclass(frozen=True)
class Meddling(Mean):
    """Moves the weights while committing."""

    def commit(self, me: Replica) -> Vector:
        me.local *= 0.9
        return me.movement()


@dataclass(frozen=True)
class Uphill(Mean):
    """The wrong sign."""

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        for commit in commits:
            center.add(commit.value, -1.0)
        return center.value


@pytest.mark.parametrize(
    ("scheme", "law"),
    [
        (Aliasing(), "it descends"),
        (FalselyElementwise(), "blocks give the same result"),
        (Meddling(), "commit changes only slots"),
        (Uphill(), "it descends"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_broken_scheme_is_told_which_law_it_breaks(scheme, law):
    with pytest.raises(LawBroken, match=law):
        pg.check_scheme(scheme)


def test_a_users_scheme_that_is_right_passes():
    pg.check_scheme(Mean())


def test_a_scheme_without_apply_says_what_is_missing():
    with pytest.raises(LawBroken, match=r"write apply\(\)"):
        pg.check_scheme(pg.Scheme())


# -- laws between schemes -------------------------------------------------------------------------------------------


def bowl_run(scheme, workers, *, choose=None, stolen=False, epochs=3, lr=0.05):
    rows = Arrays(torch.randn(46, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    job = Job(scheme, lambda device: Bowl(lr=lr), rows, None, Plan(46, 4, epochs, 0), 46)
    serial = Serial(job, workers, stolen=stolen) if choose is None else Serial(job, workers, choose=choose, stolen=stolen)
    serial.run()
    return serial


def test_agn_with_window_1_is_downpour():
    assert torch.equal(bowl_run(pg.AGN(window=1), 3).center.value, bowl_run(pg.Downpour(), 3).center.value)


def test_agn_of_one_worker_is_lookahead():
    window, rows = 4, Arrays(torch.randn(46, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    plan, slow = Plan(46, 4, 2, 0), Bowl().weights.clone()
    for start in range(0, plan.positions, window):
        fast = Bowl(weights=slow.clone())
        steps = range(start, min(start + window, plan.positions))
        for position in steps:
            fast.step(rows.batch(plan.rows_of(position)))
        slow += (fast.weights - slow) / len(steps)
    assert torch.allclose(bowl_run(pg.AGN(window=window), 1, epochs=2).center.value, slow, atol=1e-14)


def test_elastic_exchanges_conserve_the_sum_of_workers_and_center():
    rows = Arrays(torch.randn(40, 7, dtype=torch.float64))
    serial = Serial(Job(pg.AEASGD(window=1, alpha=0.3), lambda device: Bowl(lr=0.0), rows, None, Plan(40, 2, 2, 0), 40), 3)
    serial.run(commits=3)
    settle(serial)
    for rank, actor in enumerate(serial.actors):
        actor.learner.weights += rank + 1.0
    before = sum(a.learner.weights for a in serial.actors) + serial.center.value
    start = serial.center.value.clone()
    serial.run(commits=30)
    settle(serial)
    after = sum(a.learner.weights for a in serial.actors) + serial.center.value
    assert torch.allclose(before, after, atol=1e-12)
    assert float((serial.center.value - start).abs().max()) > 0.5, "the center must have been pulled"


def settle(serial):
    """Let every worker adopt the answer that lies ready for it, and no more."""
    for actor in serial.actors:
        if actor.reply is not None:
            serial.job.scheme.adopt(actor.me, actor.reply)
            actor.reply.value.zero_()


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 5), st.randoms(use_true_random=False))
def test_the_sum_of_staleness_counts_the_commits_of_others(workers, dice):
    serial = bowl_run(pg.Downpour(), workers, choose=dice.choice, stolen=True)
    last, expected = dict.fromkeys(range(workers), 0), 0
    for clock, done in enumerate(serial.applied):
        expected += clock - last[done.worker]
        last[done.worker] = clock + 1
    assert sum(done.staleness for done in serial.applied) == expected


@settings(deadline=None, max_examples=20)
@given(
    workers=st.integers(1, 4),
    batch=st.integers(3, 9),
    optimizer=st.sampled_from(["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam"]),
    weighted=st.booleans(),
    epochs=st.integers(1, 2),
)
def test_syncsgd_is_one_process_with_the_whole_batch(workers, batch, optimizer, weighted, epochs):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(53, 4, dtype=torch.float64, generator=generator), torch.randint(0, 3, (53,), generator=generator)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64) if weighted else None)
    make = partial(getattr(torch.optim, optimizer), lr=0.02)
    source = Arrays((x, y))
    job = Job(pg.SyncSGD(), lambda device: TorchLearner(module, loss, make), source, None, Plan(53, batch, epochs, 0), 53)
    center = Serial(job, workers).run()
    big = TorchLearner(module, loss, make)
    plan = Plan(53, batch * workers, epochs, 0)
    for position in range(plan.positions):
        big.step(source.batch(plan.rows_of(position)))
    assert torch.allclose(center.value, big.weights, atol=1e-10, rtol=0)


# -- known to diverge -----------------------------------------------------------------------------------------------


def test_pull_then_commit_diverges_where_the_atomic_form_holds():
    ends = {}
    for atomic in (True, False):
        scheme = pg.AEASGD(window=1, alpha=0.5, atomic=atomic)
        rows = Arrays(torch.zeros(800, 7, dtype=torch.float64))
        serial = Holding(Job(scheme, lambda device: Bowl(lr=0.01), rows, None, Plan(800, 2, 2, 0), 800), 10, stolen=True)
        ends[atomic] = everyone_pulls_then_everyone_commits(serial) if not atomic else float(serial.run().value.abs().max())
    assert ends[True] < 3.0
    assert ends[False] > 1e3


def everyone_pulls_then_everyone_commits(serial):
    """The worst order of the thesis's form: all n pull the same center before any of them commits."""
    serial.holds = True
    serial.start()
    for _ in range(60):
        for rank in range(serial.workers):
            serial.step(rank)
        for rank in range(serial.workers):
            serial.let_go(rank)
    return float(serial.center.value.abs().max())


@pytest.mark.parametrize(
    ("scheme", "workers", "said"),
    [
        (pg.Downpour(window=5), 4, "AGN"),
        (pg.Downpour(), 20, "known to diverge"),
        (pg.AEASGD(alpha=0.5, atomic=False), 10, "alpha below 0.182"),
        (pg.AGN(window=4), 40, "A window of 22"),
    ],
)
def test_a_choice_known_to_diverge_is_warned_of_with_the_number_and_the_remedy(scheme, workers, said):
    (warning,) = scheme.warnings(pg.SchemePlan(workers))
    assert said in warning


@pytest.mark.parametrize("scheme", [pg.Downpour(), pg.AGN(), pg.AEASGD(alpha=0.9), pg.SyncSGD(), pg.DiLoCo()])
def test_a_sound_choice_is_not_warned_of(scheme):
    assert scheme.warnings(pg.SchemePlan(4)) == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pg.AGN(window=0), "window=0"),
        (lambda: pg.AGN(bound=0), "bound=0"),
        (lambda: pg.SyncSGD(window=2), "leave window at 1"),
        (lambda: pg.SyncSGD(bound=2), "synchronous"),
        (lambda: pg.AEASGD(alpha=1.5), "alpha=1.5"),
        (lambda: pg.DiLoCo(outer_momentum=1.0), "momentum=1.0"),
        (lambda: pg.ModelAveraging(starts="home"), "starts='home'"),
    ],
)
def test_a_bad_field_is_refused_with_its_value(make, said):
    with pytest.raises(pg.UsageError, match=said):
        make()


def test_what_a_center_knows_of_its_workers_speeds_is_kept_by_a_snapshot():
    scheme = pg.AGN(window=3)
    first, second = bowl_run(scheme, 2).center, bowl_run(scheme, 2, epochs=1).center
    first.ledger.speeds[1] = 7.0
    second.restore(first.snapshot())
    assert second.ledger.speeds == [first.ledger.speeds[0], 7.0]
