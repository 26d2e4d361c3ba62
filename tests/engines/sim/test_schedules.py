"""Whatever happens to workers, messages and the center, the books are right: random schedules, and some that went wrong."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import paragrad as pg
from paragrad.core.center import Center
from paragrad.data.leases import Leases
from paragrad.laws.bowl import Bowl
from paragrad.types import Commit
from tests.engines.sim.schedules import Schedule, Unheld, check, run, schedules

pytestmark = pytest.mark.usefixtures("one_thread")


@settings(max_examples=150, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(schedules())
def test_no_schedule_breaks_a_law(schedule):
    check(schedule)


def on(scheme, *faults, workers=2, batches=5, epochs=2, poisoned=(), partition="dealt", **cluster):
    """A schedule in a line."""
    return Schedule(scheme, workers, batches, epochs, partition, pg.Cluster(faults=faults, **cluster), poisoned)


# -- runs that once went wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [pg.AGN(window=1), pg.SyncSGD(), pg.SoftSync()], ids=repr)
@pytest.mark.parametrize(
    "fault", [pg.Leave(worker=0, at=2.5), pg.Crash(worker=0, at=2.5, down=50.0)], ids=lambda fault: type(fault).__name__
)
def test_a_commit_that_comes_after_its_worker_was_given_up_does_not_count(scheme, fault):
    counts = check(on(scheme, fault, latency=1.0, replace_after=0.0))
    assert counts["steps lost with their worker"] > 0


def test_a_round_with_two_commits_that_are_not_finite_refuses_both():
    assert check(on(pg.SyncSGD(), workers=4, batches=4, epochs=1, poisoned=(0,)))["not finite"] == 2


@pytest.mark.parametrize("fault", [pg.Crash(worker=0, at=1000.0), pg.Join(worker=1, at=1000.0)], ids=lambda f: type(f).__name__)
def test_a_run_is_over_with_its_last_commit_whatever_was_still_to_come(fault):
    seen = run(on(pg.AGN(window=2), fault))
    assert seen.said is None
    assert seen.seconds <= 10


def test_a_worker_that_is_gone_does_not_ask_again():
    faults = (pg.DropMessage(worker=0, at=1.0, answer=True), pg.Crash(worker=0, at=1.5, down=20.0))
    check(on(pg.AGN(window=1), *faults, retry=2.0))


def test_a_worker_that_stands_still_does_not_commit_on_what_it_pulled():
    seen = run(on(pg.GEM(), pg.Pause(worker=0, at=3.5, seconds=30.0), workers=1, batches=1, epochs=1, latency=1.0))
    assert seen.seconds == 33.5 + 1.0


# -- the center, told one thing after another ----------------------------------------------------------------------


def center_of(scheme, workers=2, *, batches=8):
    """A center whose workers have joined."""
    bowl = Bowl()
    center = Center(
        scheme,
        bowl.weights,
        workers=workers,
        leases=Leases(batches=batches, epochs=1, workers=workers),
        optimizer=bowl.center_optimizer() if scheme.ships == "gradient" else None,
    )
    for worker in range(workers):
        center.join(worker)
    return center


def commit_of(center, worker, sequence, version, *, value=0.1, incarnation=0):
    """A window of one step on the next batch that the worker holds."""
    value = torch.full_like(center.value, value)
    waiting = {position for commit in center.round.commits for position in commit.batches}
    batches = tuple(position for position in center.leases.held(worker) if position not in waiting)[:1]
    return Commit(worker, sequence, version, value, 1, incarnation=incarnation, rows=2, batches=batches, lr=0.05)


def test_a_dropped_commit_that_comes_twice_is_dropped_once_and_costs_its_worker_no_lease():
    center = center_of(pg.BackupWorkers())
    center.receive(commit_of(center, 0, 1, 0))
    late = commit_of(center, 1, 1, 0)
    (first,) = center.receive(late)
    (again,) = center.receive(late)
    assert not first.applied
    assert not again.applied
    assert first.batches == again.batches == center.leases.held(1)
    assert center.ledger.counts.dropped == 1
    assert [reply.sequence for reply in center.receive(commit_of(center, 1, 2, 1))] == [2]
    assert center.receive(late) == []


def test_a_dropped_commit_that_comes_again_does_not_take_the_answer_of_the_one_that_waits_in_the_round():
    center = center_of(pg.BackupWorkers(), 3)
    for worker in (0, 1):
        center.receive(commit_of(center, worker, 1, 0))
    late = commit_of(center, 2, 1, 0)
    center.receive(late)
    assert center.receive(commit_of(center, 2, 2, 1)) == []
    assert center.receive(late) == []
    replies = center.receive(commit_of(center, 0, 2, 1))
    assert {(reply.worker, reply.sequence, reply.applied) for reply in replies} == {(0, 2, True), (2, 2, True)}


@pytest.mark.parametrize("scheme", [pg.DCASGD(), pg.ADAG(window=1), pg.AEASGD(window=1), pg.AGN(window=1)], ids=repr)
def test_a_commit_that_comes_again_gets_the_answer_that_it_got(scheme):
    center = center_of(scheme)
    sent = commit_of(center, 0, 1, 0)
    (first,) = center.receive(sent)
    value, version = first.value.clone(), first.version
    center.receive(commit_of(center, 1, 1, 0))
    (again,) = center.receive(sent)
    assert again.version == version
    assert torch.equal(again.value, value)
    assert again.batches == center.leases.held(0)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_commit_in_a_round_that_turns_out_not_finite_is_not_answered_to_who_took_its_workers_place(replaced):
    center = center_of(pg.EASGD(window=1))
    assert center.receive(commit_of(center, 0, 1, 0, value=math.nan)) == []
    assert (center.join(0, 1) if replaced else center.leave(0)) == []
    replies = center.receive(commit_of(center, 1, 1, 0))
    assert center.ledger.counts.refused == 1
    if replaced:
        assert [(reply.worker, reply.sequence, reply.applied) for reply in replies] == [(0, -2, True)]
        assert center.receive(commit_of(center, 0, 1, 0, incarnation=1))
    else:
        assert [(reply.worker, reply.sequence) for reply in replies] == [(1, 1)]
    assert center.clock == 1
    assert not center.leases.held(0) or replaced


def test_what_waits_while_its_worker_goes_on_is_looked_at_when_it_comes():
    center = center_of(Unheld(window=1), 3)
    (reply,) = center.receive(commit_of(center, 0, 1, 0, value=math.nan))
    assert not reply.applied
    assert reply.batches == center.leases.held(0)


def test_a_commit_that_comes_again_while_it_waits_keeps_its_place_in_the_order():
    center = center_of(pg.EASGD(window=1))
    arrived = []
    center.applied = lambda commit: arrived.append(commit.arrived)
    sent = commit_of(center, 0, 1, 0)
    center.receive(sent)
    center.receive(sent)
    center.receive(commit_of(center, 1, 1, 0))
    assert arrived == [3, 5]


def test_who_is_there_is_a_matter_of_what_came_before():
    moves = (pg.Join(worker=0, at=5.0), pg.Leave(worker=0, at=9.0), pg.Leave(worker=1, at=7.0))
    cluster = pg.Cluster(faults=moves)
    assert [cluster.there(0, at) for at in (0.0, 5.0, 5.1, 9.0, 9.1)] == [False, False, True, True, False]
    assert [cluster.there(1, at) for at in (0.0, 7.0, 7.1)] == [True, True, False]
    assert all(cluster.there(2, early) and cluster.there(2, late) for early, late in pairwise((0.0, 3.0, 50.0)))
