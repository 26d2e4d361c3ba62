"""The next window computed while a commit is in flight: what that is, in ten lines of plain descent for each kind of scheme."""

from __future__ import annotations

import math

import pytest
import torch

import paragrad as pg
from paragrad import schemes
from paragrad.config.options import describe, parse
from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.core.replica import Replica
from paragrad.core.worker import RECEIVE, Odometer, work
from paragrad.data.leases import Leases
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial
from paragrad.errors import UsageError
from paragrad.laws.bowl import SIZE, Bowl
from paragrad.schemes.scheme import Scheme
from paragrad.schemes.traits import is_scaled_movement
from paragrad.types import Done, Reply
from tests.laws.table import TABLE

ROWS = Arrays(torch.randn(46, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
PLAN = Plan(46, 4, 3, 0)


def job(scheme: Scheme, make=Bowl) -> Job:
    return Job(scheme, lambda device: make(), ROWS, None, PLAN, 46)


def run(scheme: Scheme, workers: int = 1, *, stolen: bool = False) -> Serial:
    serial = Serial(job(scheme), workers, stolen=stolen)
    serial.run()
    return serial


def batch(position: int) -> torch.Tensor:
    return ROWS.batch(PLAN.rows_of(position))


def moved(start: torch.Tensor, positions: range) -> torch.Tensor:
    """How far plain descent goes from there."""
    bowl = Bowl(weights=start.clone())
    for position in positions:
        bowl.step(batch(position))
    return bowl.weights - start


def windows(length: int) -> list[range]:
    return [range(lo, min(lo + length, PLAN.positions)) for lo in range(0, PLAN.positions, length)]


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-12, rtol=0)


def descended() -> torch.Tensor:
    bowl = Bowl()
    bowl.weights += moved(bowl.weights, range(PLAN.positions))
    return bowl.weights


# -- one worker -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [pg.Downpour(window=3, overlap=1), pg.ModelAveraging(window=4, overlap=1)], ids=repr)
def test_one_worker_that_adds_whole_movements_is_plain_training(scheme):
    """Its weights are the center plus what is in flight, whether that has arrived or not: staleness is 1, and harmless."""
    serial = run(scheme)
    assert near(serial.center.value, descended())
    assert [commit.staleness for commit in serial.applied[1:]] == [1] * (len(serial.applied) - 1)


@pytest.mark.parametrize("scheme", [pg.SyncSGD(overlap=1), pg.SoftSync(overlap=1), pg.StalenessAware(overlap=1)], ids=repr)
def test_one_worker_that_ships_gradients_is_descent_with_gradients_one_update_late(scheme):
    center, before = Bowl().weights, Bowl().weights
    for position in range(PLAN.positions):
        slope, _ = Bowl(weights=before)._slope(batch(position))
        before, center = center, center - 0.05 * slope
    assert near(run(scheme).center.value, center)
    assert not near(center, descended())


def test_agn_goes_on_from_its_fast_weights_and_takes_the_slow_ones_one_window_late():
    local = center = Bowl().weights
    in_flight = torch.zeros(SIZE, dtype=torch.float64)
    for window in windows(5):
        movement = moved(local, window)
        center = center + in_flight
        local = center + movement
        in_flight = movement / len(window)
    center = center + in_flight
    assert near(run(pg.AGN(window=5, overlap=1)).center.value, center)


@pytest.mark.parametrize(
    "scheme", [pg.AEASGD(window=2, alpha=0.3, overlap=1), pg.EASGD(window=2, alpha=0.3, overlap=1)], ids=repr
)
def test_an_elastic_worker_feels_the_pull_one_window_late(scheme):
    weights, center, pull = Bowl().weights, Bowl().weights, torch.zeros(SIZE, dtype=torch.float64)
    for window in windows(2):
        weights = weights + moved(weights, window) - pull
        pull = 0.3 * (weights - center)
        center = center + pull
    assert near(run(scheme).center.value, center)


# -- several --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 5, 7])
def test_a_round_is_the_large_batch_one_update_late_also_where_an_epoch_does_not_divide_evenly(workers):
    """At the end of an epoch a worker may sit a round out: it then has nothing in flight, and begins from the answer."""
    center, before, there = Bowl().weights, Bowl().weights, range(workers)
    for first in range(0, PLAN.positions, PLAN.batches):
        for lo in range(first, first + PLAN.batches, workers):
            positions = range(lo, min(lo + workers, first + PLAN.batches))
            slopes = [
                Bowl(weights=before if worker in there else center)._slope(batch(position))
                for worker, position in enumerate(positions)
            ]
            total = sum(step.weight for _, step in slopes)
            mean = sum(slope * (step.weight / total) for slope, step in slopes)
            before, center, there = center, center - 0.05 * mean, range(len(positions))
    assert near(run(pg.SyncSGD(overlap=1), workers).center.value, center)


def test_model_averaging_adds_what_was_moved_in_flight_to_the_mean():
    """Even rounds: every worker ends at the mean of the weights that were sent, plus its own window since."""
    plan = Plan(48, 4, 2, 0)
    rows = Arrays(torch.randn(48, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    center = Bowl().weights
    local, sent = [center] * 3, [center] * 3
    for lo in range(0, plan.positions, 6):
        movements = []
        for worker in range(3):
            bowl = Bowl(weights=local[worker].clone())
            for position in (lo + worker, lo + 3 + worker):
                bowl.step(rows.batch(plan.rows_of(position)))
            movements.append(bowl.weights - local[worker])
        center = sum(sent) / 3
        sent = local = [center + movement for movement in movements]
    serial = Serial(Job(pg.ModelAveraging(window=2, overlap=1), lambda device: Bowl(), rows, None, plan, 48), 3)
    serial.run()
    assert near(serial.center.value, sum(sent) / 3)


@pytest.mark.parametrize("scheme", [scheme for scheme, _ in TABLE if scheme.overlap], ids=repr)
@pytest.mark.parametrize("stolen", [False, True])
def test_a_worker_holds_the_leases_of_two_windows_and_no_more(scheme, stolen):
    serial = Serial(job(scheme), 3, stolen=stolen)
    held = []
    receive = serial.center.receive

    def watch(commit):
        held.append(len(serial.center.leases.held(commit.worker)))
        return receive(commit)

    serial.center.receive = watch
    serial.run()
    assert max(held) == 2 * scheme.window
    assert sum(len(commit.batches) for commit in serial.applied) == PLAN.positions


@pytest.mark.parametrize("scheme", [pg.Downpour(window=2, overlap=1), pg.StalenessAware(window=2, overlap=1)], ids=repr)
def test_a_refused_commit_takes_the_window_along_that_was_made_from_it(scheme):
    class Once(Bowl):
        made = 0

        def _slope(self, given):
            slope, step = super()._slope(given)
            Once.made += 1
            return (slope * math.nan if Once.made == 5 else slope), step

    serial = Serial(job(scheme, Once), 2, stolen=True)
    turned = []
    serial.center.refused = lambda commit, why: turned.append(commit)
    serial.run()
    assert len(turned) == 1
    assert bool(serial.center.value.isfinite().all())
    assert sorted(position for commit in serial.applied for position in commit.batches) == list(range(PLAN.positions))
    assert serial.steps_run == PLAN.positions + turned[0].steps + scheme.window


def test_a_window_that_was_cut_short_in_flight_is_not_filled_up_from_other_weights():
    """There were rows for half of it; those that came with the answer are for the next."""
    bowl = Bowl()
    loop = work(pg.StalenessAware(window=2, overlap=1), Replica(bowl.weights))
    next(loop)
    window = loop.send(Reply(0, -1, 0, bowl.weights.clone(), steps=2, batches=(0, 1, 2))).argument
    assert (window.batches, window.ahead) == ((0, 1), 0)
    first = loop.send(Done(steps=2, rows=8, weight=8.0)).argument
    assert (first.batches, first.version) == ((0, 1), 0)
    in_flight = loop.send(None).argument
    assert (in_flight.batches, in_flight.ahead) == ((2,), 2)
    assert loop.send(Done(steps=1, rows=4, weight=4.0)) == RECEIVE
    second = loop.send(Reply(0, 1, 1, bowl.weights.clone(), steps=2, batches=(3, 4))).argument
    assert (second.batches, second.version, second.saw) == ((2,), 0, 1)
    assert loop.send(None).argument.batches == (3, 4)


# -- staleness as a distance ------------------------------------------------------------------------------------------


def test_a_distance_is_from_what_the_window_began_from():
    points = [torch.tensor([float(x)]) for x in (0, 1, 3, 7, 15)]
    plain, ahead = Odometer(points[0]), Odometer(points[0])
    seen = []
    for point in points[1:]:
        plain.look(point, ahead=False)
        ahead.look(point, ahead=True)
        seen.append((plain.moved, ahead.moved))
    assert seen == [(1, 1), (2, 3), (4, 6), (8, 12)]


# -- how it is said ---------------------------------------------------------------------------------------------------


def test_it_is_a_field_like_any_other():
    scheme = parse("agn:window=15,overlap=1", "scheme", schemes)
    assert scheme == pg.AGN(window=15, overlap=1)
    assert describe(scheme) == "agn:overlap=1"
    assert not is_scaled_movement(scheme)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: pg.AGN(overlap=2), "overlap=2, but a worker has one commit in flight at a time"),
        (lambda: pg.Hogwild(overlap=1), "Hogwild cannot use overlap here: the weights of its workers are the center itself"),
        (lambda: pg.Downpour(zealous=True, overlap=1), "after each step"),
        (lambda: pg.EAMSGD(overlap=1), "after each step"),
        (lambda: pg.EASGD(ends="relative", overlap=1), "after each step"),
        (lambda: pg.DeanDownpour(fetch=2, overlap=1), "inside a window"),
        (lambda: pg.GEM(overlap=1), "pulled before the commit"),
        (lambda: pg.AEASGD(atomic=False, overlap=1), "pulled before the commit"),
        (lambda: pg.DCASGD(overlap=1), "the center remembers its last answer"),
        (lambda: pg.ADAG(overlap=1), "the distance is measured from the last answer"),
        (lambda: pg.ADAG(place="sends", overlap=1), "the distance is measured from the last answer"),
        (lambda: pg.BackupWorkers(overlap=1), "always late"),
        (lambda: pg.ModelAveraging(starts="own", overlap=1), "their own points"),
    ],
)
def test_where_it_makes_no_sense_the_reason_is_given(make, why):
    with pytest.raises(UsageError, match=why):
        make()


def test_a_scheme_with_an_adopt_of_its_own_must_say_that_it_carries():
    class Own(pg.Downpour):
        def adopt(self, me, reply):
            me.local = me.anchor = me.center = reply.value

    with pytest.raises(UsageError, match=r"carries = True"):
        Own(overlap=1)
    assert type("Carrying", (Own,), {"carries": True})(overlap=1).overlap == 1


def test_the_center_gives_a_joiner_two_windows():
    center = Center(pg.AGN(window=3, overlap=1), torch.zeros(2), workers=1, leases=Leases(batches=9, epochs=1, workers=1))
    (reply,) = center.join(0)
    assert (reply.steps, reply.batches) == (3, (0, 1, 2, 3, 4, 5))
