"""EASGD: the elastic force of all workers at once; its forms, its early windows, and where it holds."""

from __future__ import annotations

import pytest
import torch

import paragrad as pg
from paragrad.core.replica import Replica
from paragrad.laws.bowl import Bowl
from paragrad.types import Reply
from tests.schemes.golden import START, center_of, close, commit, serial, slope, vector, weights_of


def worker_at(*numbers, workers=2):
    me = Replica(vector(*numbers), workers=workers)
    me.anchor = me.center = vector(*START)
    return me


@pytest.mark.parametrize(("form", "expected"), [("sum", (2.0, 1.0, 3.0)), ("mean", (1.5, 1.5, 3.0))])
def test_the_forces_are_computed_from_the_same_center_and_workers_give_them_up(form, expected):
    scheme = pg.EASGD(window=1, alpha=0.25, form=form)
    center = center_of(scheme)
    first, second = worker_at(5.0, 2.0, 3.0), worker_at(1.0, -2.0, 3.0)
    forces = [scheme.commit(me) for me in (first, second)]
    assert [force.tolist() for force in forces] == [[1.0, 0.0, 0.0], [0.0, -1.0, 0.0]]
    first.sent = forces[0]
    assert commit(center, 0, forces[0]) == {}
    replies = commit(center, 1, forces[1])
    assert center.value.tolist() == list(expected)
    scheme.adopt(first, replies[0])
    assert first.local.tolist() == [4.0, 2.0, 3.0]
    assert first.center.tolist() == list(expected)


def test_by_default_alpha_is_beta_divided_by_the_workers():
    assert close(pg.EASGD().commit(worker_at(2.0, 2.0, 3.0, workers=3)), vector(0.3, 0.0, 0.0))
    assert close(pg.EASGD(beta=0.6).commit(worker_at(2.0, 2.0, 3.0, workers=3)), vector(0.2, 0.0, 0.0))
    assert close(pg.EASGD(beta=0.6, alpha=0.5).commit(worker_at(2.0, 2.0, 3.0, workers=3)), vector(0.5, 0.0, 0.0))


@pytest.mark.parametrize("form", ["sum", "mean"])
def test_a_run_is_the_published_loop(form):
    workers, alpha, lr = 3, 0.2, 0.05
    run = serial(pg.EASGD(window=2, alpha=alpha, form=form), workers, lr=lr)
    run.run()
    start = Bowl().weights
    center, mine = start.clone(), [start.clone() for _ in range(workers)]
    for round_ in range(0, len(run.applied), workers):
        for done in run.applied[round_ : round_ + workers]:
            for position in done.batches:
                mine[done.worker] -= lr * slope(run, position, mine[done.worker])
        forces = [alpha * (w - center) for w in mine]
        mine = [w - force for w, force in zip(mine, forces, strict=True)]
        center += sum(forces) / (1 if form == "sum" else workers)
    assert len(run.applied) == workers * 6
    assert close(run.center.value, center)
    assert all(close(ours, theirs) for ours, theirs in zip(weights_of(run), mine, strict=True))


@pytest.mark.parametrize(("form", "share"), [("sum", 1), ("mean", 3)])
def test_the_sum_of_workers_and_center_is_conserved(form, share):
    run = serial(pg.EASGD(window=2, form=form, starts="own"), 3, lr=0.0)
    before = sum(own_points(3)) + share * run.center.value
    start = run.center.value.clone()
    run.run()
    assert close(sum(weights_of(run)) + share * run.center.value, before, within=1e-10)
    assert not close(run.center.value, start, within=0.1), "the center must have been pulled"


def own_points(workers):
    bowls = [Bowl() for _ in range(workers)]
    for rank, bowl in enumerate(bowls):
        bowl.scatter(rank + 1)
    return [bowl.weights for bowl in bowls]


@pytest.mark.parametrize("form", ["sum", "mean"])
def test_one_worker_is_aeasgd(form):
    ours = serial(pg.EASGD(window=3, beta=0.3, form=form), 1).run().value
    assert close(ours, serial(pg.AEASGD(window=3, alpha=0.3), 1).run().value, within=1e-14)


def test_workers_start_together_or_each_from_a_point_of_its_own():
    for starts, apart in (("center", False), ("own", True)):
        run = serial(pg.EASGD(window=1, starts=starts), 3, lr=0.0)
        run.run(commits=3)
        assert all(bool(done.value.abs().max() > 0.01) is apart for done in run.applied)


# -- early windows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "moved", "goes_on"),
    [("thesis", 0.65, True), ("thesis", 0.55, False), ("relative", 0.55, True), ("relative", 0.45, False)],
)
def test_a_window_ends_where_a_step_is_short_against_the_spring(ends, moved, goes_on):
    me = worker_at(1.0 + 3.0, 2.0 + 4.0, 3.0)
    me.moved, me.lr = moved, 0.1
    assert pg.EASGD(alpha=0.1, ends=ends).go_on(me) is goes_on  # ‖α(w - c)‖ = 0.5, η = 0.1


def test_only_the_early_forms_are_asked_after_each_step():
    assert [pg.EASGD(ends=ends).early for ends in ("window", "thesis", "relative")] == [None, "step", "step"]


def test_the_thesis_form_commits_after_every_step_once_gradients_are_short():
    run = serial(pg.EASGD(window=8, ends="thesis"), 2)
    for actor in run.actors:
        actor.learner.curvature.mul_(0.01)
    run.run()
    assert {done.steps for done in run.applied} == {1}


def test_the_relative_form_does_not_care_how_short_gradients_are():
    steps = []
    for factor in (1.0, 0.01):
        run = serial(pg.EASGD(window=8, ends="relative"), 2, lr=0.05 / factor)
        for actor in run.actors:
            actor.learner.curvature.mul_(factor)
        run.run()
        steps.append([done.steps for done in run.applied])
    assert steps[0] == steps[1]
    assert 1 < max(steps[0]) < 8


# -- where it holds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "alpha", "holds"),
    [("sum", 0.39, True), ("sum", 0.4, False), ("sum", 0.41, False), ("mean", 0.9, True), ("mean", 1.0, False)],
)
def test_it_warns_exactly_where_the_distance_of_the_workers_from_the_center_does_not_shrink(form, alpha, holds):
    scheme = pg.EASGD(window=1, alpha=alpha, form=form, starts="own")
    run = serial(scheme, 4, lr=0.0)
    before = sum(own_points(4)) / 4 - run.center.value
    run.run()
    after = sum(weights_of(run)) / 4 - run.center.value
    rounds = len(run.applied) // 4
    assert close(after, before * (1 - alpha * (5 if form == "sum" else 2)) ** rounds, within=1e-9)
    assert (float(after.norm()) < 0.99 * float(before.norm())) is holds
    assert bool(scheme.warnings(pg.SchemePlan(4))) is not holds


@pytest.mark.parametrize(
    ("scheme", "workers", "said"),
    [
        (pg.EASGD(alpha=0.5), 10, ("alpha * (workers + 1) = 5.50", "alpha below 0.182", "beta below 1.818")),
        (pg.EASGD(beta=1.7), 4, ("alpha=0.425", "alpha * (workers + 1) = 2.12", "alpha below 0.400", "beta below 1.600")),
        (pg.EASGD(beta=1.0), 1, ("alpha * (workers + 1) = 2.00", "beta below 1.000")),
        (pg.EASGD(form="mean", alpha=1.0), 4, ("alpha * 2 = 2.00", "alpha below 1.000", "beta below 4.000")),
    ],
)
def test_a_choice_known_to_diverge_is_warned_of_with_the_value_that_holds(scheme, workers, said):
    (warning,) = scheme.warnings(pg.SchemePlan(workers))
    assert all(text in warning for text in said), warning


@pytest.mark.parametrize("workers", [1, 2, 10, 100])
def test_the_defaults_hold_for_any_number_of_workers(workers):
    assert pg.EASGD().warnings(pg.SchemePlan(workers)) == []
    assert pg.EASGD(form="mean", alpha=0.9).warnings(pg.SchemePlan(workers)) == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pg.EASGD(beta=0.0), "beta=0.0"),
        (lambda: pg.EASGD(alpha=0.0), "alpha=0.0.*0 < alpha <= 1"),
        (lambda: pg.EASGD(alpha=1.5), "alpha=1.5"),
        (lambda: pg.EASGD(form="product"), "form='product'.*'sum', 'mean'"),
        (lambda: pg.EASGD(ends="never"), "ends='never'.*'window', 'thesis', 'relative'"),
        (lambda: pg.EASGD(starts="home"), "starts='home'.*'center', 'own'"),
        (lambda: pg.EASGD(bound=2), "synchronous"),
        (lambda: pg.EASGD(window=0), "window=0"),
    ],
)
def test_a_bad_value_is_refused_with_its_name(make, said):
    with pytest.raises(pg.UsageError, match=said):
        make()


def test_a_worker_put_back_to_the_center_computes_its_force_from_there():
    scheme, me = pg.EASGD(window=1, alpha=0.5), worker_at(9.0, 9.0, 9.0)
    me.begin_again(vector(2.0, 2.0, 2.0), 7)
    me.local += vector(1.0, 0.0, -1.0)
    me.sent = scheme.commit(me)
    assert me.sent.tolist() == [0.5, 0.0, -0.5]
    scheme.adopt(me, Reply(worker=0, sequence=1, version=8, value=vector(2.5, 2.0, 1.5)))
    assert me.local.tolist() == [2.5, 2.0, 1.5]
    assert torch.equal(scheme.commit(me), vector(0.0, 0.0, 0.0))


def test_a_replacement_begins_from_the_center_and_not_from_a_random_point_again():
    run = serial(pg.EASGD(window=2, starts="own"), 2)
    run.start()
    apart = [weights.clone() for weights in weights_of(run)]
    while len(run.applied) < 4:
        run.step(run.ready[0])
    run.crash(1)
    run.step(1)
    assert close(run.actors[1].me.center, run.center.value)
    assert float((weights_of(run)[1] - run.center.value).abs().max()) < 0.5
    assert not close(weights_of(run)[1], apart[1], 0.1)
