"""ADAG: c <- c + d / λ' / (1 + (c - a)² / γ), three forms in three places."""

from __future__ import annotations

import pytest
import torch

import paragrad as pg
from paragrad.core.replica import Replica
from paragrad.types import Reply
from tests.schemes.golden import START, center_of, near, run, send, vector

FORMS = ("eta", "gamma", "invariant")


@pytest.mark.parametrize("place", ["remembers", "sends"])
@pytest.mark.parametrize(
    ("form", "half"),
    [("gamma", 1 / (1 + 0.25 / 0.25)), ("eta", 1 / (1 + 0.25 / 0.5)), ("invariant", 1 / (1 + (0.5 / 0.5) ** 2))],
)
def test_a_movement_is_normalised_and_shrunk_by_the_distance(form, half, place):
    center = center_of(pg.ADAG(window=2, form=form, gamma=0.25, place=place))
    also = {"anchor": START} if place == "sends" else {}
    send(center, 0, [1.0, 0.0, 0.0], steps=2, version=0, lr=0.5, **also)
    assert near(center.value, 1.5, 2.0, 3.0)  # nothing had moved: d / 2
    send(center, 1, [4.0, 4.0, -2.0], steps=2, version=0, lr=0.5, **also)
    assert near(center.value, 1.5 + 2 * half, 4.0, 2.0)  # only the first element had, by 0.5


def test_the_worker_shrinks_after_one_more_pull_and_adopts_pulled_plus_sent():
    scheme = pg.ADAG(window=2, gamma=0.25, place="pulls")
    me = Replica(vector(5.0, 6.0, 1.0))
    me.anchor, me.center, me.steps, me.lr = vector(*START), vector(1.5, 2.0, 3.0), 2, 0.5
    sent = scheme.commit(me)
    assert near(sent, 1.0, 2.0, -1.0)
    center = center_of(scheme)
    send(center, 1, sent.tolist())
    assert near(center.value, 2.0, 4.0, 2.0)
    me.sent = sent
    scheme.adopt(me, Reply(worker=0, sequence=1, version=1, value=vector(9.0, 9.0, 9.0)))
    assert near(me.local, 2.5, 4.0, 2.0)
    assert near(me.anchor, 2.5, 4.0, 2.0)
    assert me.anchor is not me.local


@pytest.mark.parametrize("place", ["remembers", "sends", "pulls"])
@pytest.mark.parametrize("form", FORMS)
def test_where_the_center_has_not_moved_it_is_agn(form, place):
    ends = [run(scheme, 1).center.value for scheme in (pg.ADAG(window=3, form=form, place=place), pg.AGN(window=3))]
    assert torch.allclose(ends[0], ends[1], atol=1e-13, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_it_is_not_agn_where_the_center_has_moved(form):
    ends = [run(scheme, 3).center.value for scheme in (pg.ADAG(window=3, form=form, gamma=1e-3), pg.AGN(window=3))]
    assert not torch.allclose(ends[0], ends[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_remembered_anchor_is_a_sent_one_in_any_order(form):
    def fickle(ready):
        return ready[sum(ready) % len(ready)]

    ends = [run(pg.ADAG(window=3, form=form, place=place), 4, choose=fickle).center.value for place in ("remembers", "sends")]
    assert torch.equal(*ends)


@pytest.mark.parametrize("form", FORMS)
def test_where_a_pull_takes_no_time_all_three_places_are_one(form):
    ends = [run(pg.ADAG(window=3, form=form, place=place), 3).center.value for place in ("remembers", "pulls")]
    assert torch.allclose(*ends, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("form", "changes"), [("eta", True), ("gamma", True), ("invariant", False)])
def test_only_the_invariant_form_is_the_same_at_every_learning_rate(form, changes):
    """What is left of a movement, if movement and distance both grow with η."""
    scheme, movement, distance = pg.ADAG(form=form), vector(1.0, -2.0, 3.0), vector(0.1, 1.0, 2.0)
    shares = [scheme.shrink(lr * movement, lr * distance, lr) / (lr * movement) for lr in (0.01, 0.1)]
    assert torch.allclose(*shares) != changes


def test_a_larger_gamma_forgives_more():
    shares = [pg.ADAG(gamma=gamma).shrink(vector(1.0), vector(0.1), 0.1) for gamma in (1e-4, 1e-2, 1.0)]
    assert [round(float(share), 4) for share in shares] == [0.0099, 0.5, 0.9901]


@pytest.mark.parametrize("form", FORMS)
def test_a_learning_rate_of_zero_makes_no_nan(form):
    left = pg.ADAG(form=form).shrink(vector(0.0, 0.0, 2.0), vector(0.0, 1.0, 0.0), 0.0)
    assert left.tolist() == [0.0, 0.0, 2.0]
    center = center_of(pg.ADAG(form=form))
    send(center, 0, [0.0, 0.0, 0.0], lr=0.0)
    assert near(center.value, *START)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tiny_learning_rate_is_finite_in_single_precision(dtype):
    left = pg.ADAG(form="invariant").shrink(torch.ones(2, dtype=dtype), torch.tensor([0.0, 1e3], dtype=dtype), 0.0)
    assert left[0] == 1.0
    assert 0 <= left[1] < 1e-30


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gamma": 0.0}, "gamma=0.0, but it must be above 0"),
        ({"gamma": -1.0}, "gamma=-1.0"),
        ({"gamma": float("nan")}, "gamma=nan"),
        ({"form": "beta"}, "form='beta', but it must be 'eta', 'gamma' or 'invariant'"),
        ({"place": "home"}, "place='home', but it must be 'remembers', 'sends' or 'pulls'"),
        ({"window": 0}, "window=0"),
        ({"bound": 0}, "bound=0"),
    ],
)
def test_a_bad_value_is_refused(options, said):
    with pytest.raises(pg.UsageError, match=said):
        pg.ADAG(**options)


def test_its_docstring_says_the_name_trap():
    assert "Distributed Keras" in pg.ADAG.__doc__
    assert "Experimental" in pg.ADAG.__doc__


@pytest.mark.parametrize("form", ["eta", "invariant"])
def test_an_optimiser_without_a_rate_is_refused_where_the_rate_is_the_measure(form):
    with pytest.raises(pg.UsageError, match=r"the optimiser's learning rate, which is nan\. Take form='gamma'"):
        send(center_of(pg.ADAG(form=form)), 0, [1.0, 1.0, 1.0], lr=float("nan"))
    center = center_of(pg.ADAG(window=1))
    send(center, 0, [1.0, 1.0, 1.0], lr=float("nan"))
    assert near(center.value, 2.0, 3.0, 4.0)
