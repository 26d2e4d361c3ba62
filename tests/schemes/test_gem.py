"""GEM: π = clip((κ|p| - |m|) / (|u| + ε), 0, 5)."""

from __future__ import annotations

import pytest
import torch

import paragrad as pg
from paragrad.core.replica import Replica
from paragrad.types import Reply
from tests.laws.table import Holding
from tests.schemes.golden import center_of, near, run, send, serial, vector


def worker(scheme, *, began=(0.0, 0.0, 0.0)):
    """One that has just joined."""
    me = Replica(vector(0.0, 0.0, 0.0), slots=scheme.worker_slots)
    me.begin_again(vector(*began), 0)
    scheme.begin(me)
    return me


def window(scheme, me, *, moved, pulled):
    """Local steps, a pull and a commit."""
    me.local = me.local + vector(*moved)
    me.center = vector(*pulled)
    me.sent = scheme.commit(me)
    return me.sent


def answer(scheme, me):
    me.commits += 1
    scheme.adopt(me, Reply(worker=0, sequence=1, version=1, value=vector(9.0, 9.0, 9.0)))
    scheme.begin(me)


def test_two_commits_by_hand():
    scheme = pg.GEM()
    me = worker(scheme)
    # p = u; m = (0, 0.5, 3): π = (2 - 0, (2 - 0.5) / 1, (4 - 3) / 2)
    sent = window(scheme, me, moved=(1.0, -1.0, 2.0), pulled=(0.0, 0.5, 3.0))
    assert near(sent, 2.0, -1.5, 1.0)
    answer(scheme, me)
    assert near(me.local, 2.0, -1.0, 4.0)  # pulled + sent, not what it was answered with
    assert near(me.anchor, 2.0, -1.0, 4.0)
    # p = 0.9 p + u = (1.9, -0.4, 2.3); m = (2, -1.5, 1), its own commit included: π = ((3.8 - 2) / 1, 0, (4.6 - 1) / 0.5 -> 5)
    sent = window(scheme, me, moved=(1.0, 0.5, 0.5), pulled=(2.0, -1.0, 4.0))
    assert near(sent, 1.8, 0.0, 2.5)


def test_the_center_adds_what_is_sent():
    center = center_of(pg.GEM())
    send(center, 1, [0.5, -1.0, 0.25])
    assert near(center.value, 1.5, 1.0, 3.25)


def test_it_is_seeded_with_the_first_pull_so_that_the_first_commit_is_something():
    scheme = pg.GEM()
    me = worker(scheme, began=(100.0, -50.0, 7.0))
    assert near(window(scheme, me, moved=(1.0, 1.0, 1.0), pulled=(100.0, -50.0, 7.0)), 2.0, 2.0, 2.0)


def test_an_element_that_did_not_move_commits_nothing_and_no_nan():
    scheme = pg.GEM()
    me = worker(scheme)
    assert near(window(scheme, me, moved=(0.0, 1.0, 0.0), pulled=(0.0, 0.0, 1.0)), 0.0, 2.0, 0.0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kappa": 1.0}, (0.5, 0.4)),
        ({"momentum": 0.0}, (1.5, 0.5)),
        ({"clip": 1.2}, (1.2, 1.2)),
        ({"epsilon": 1.0}, (0.75, (3.8 - 1.5) / 2)),
        ({}, (1.5, 3.8 - 1.5)),
    ],
)
def test_every_option_has_its_effect(options, expected):
    scheme = pg.GEM(**options)
    me = worker(scheme)
    first = window(scheme, me, moved=(1.0, 0.0, 0.0), pulled=(0.5, 0.0, 0.0))
    assert first[0].item() == pytest.approx(expected[0])
    answer(scheme, me)
    second = window(scheme, me, moved=(1.0, 0.0, 0.0), pulled=(2.0, 0.0, 0.0))
    assert second[0].item() == pytest.approx(expected[1])


def test_after_a_refusal_it_counts_from_the_center_it_begins_again_from():
    scheme = pg.GEM()
    me = worker(scheme)
    window(scheme, me, moved=(1.0, 1.0, 1.0), pulled=(0.0, 0.0, 0.0))
    answer(scheme, me)
    before = {name: slot.clone() for name, slot in me.slots.items()}
    window(scheme, me, moved=(1.0, 1.0, 1.0), pulled=(3.0, 3.0, 3.0))
    me.slots.update(before)  # what the worker's loop does
    me.begin_again(vector(5.0, 5.0, 5.0), 4)
    scheme.begin(me)
    assert near(me.slots["pulled"], 5.0, 5.0, 5.0)
    assert near(me.slots["proxy"], 1.0, 1.0, 1.0)
    # p = 0.9 + 1; nobody moved the center since
    assert near(window(scheme, me, moved=(1.0, 1.0, 1.0), pulled=(5.0, 5.0, 5.0)), 3.8, 3.8, 3.8)


def test_a_replacements_first_window_is_measured_from_what_it_was_given():
    serial = run(pg.GEM(), 2, commits=6)
    serial.crash(1)
    given = serial.actors[1].reply.value.clone()
    clock = serial.center.clock
    serial.choose = lambda ready: 1 if 1 in ready else ready[0]
    serial.run(commits=7)
    sent = serial.applied[-1]
    assert sent.worker == 1
    assert sent.version == clock
    moved = serial.actors[1].me.slots["proxy"]
    assert torch.allclose(sent.value, 2 * moved)  # κ = 2, a first proxy, and a center that stood still: π = 2
    assert torch.allclose(serial.center.value, given + 2 * moved)


def test_many_workers_hold_where_downpour_diverges():
    ends = [
        float(run(scheme, 8, lr=0.3, flat=True, rows=400, epochs=4).center.value.abs().max())
        for scheme in (pg.GEM(), pg.Downpour())
    ]
    assert ends[0] < 10
    assert ends[1] > 1e3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"momentum": 1.0}, "momentum=1.0, but the proxy needs 0 <= momentum < 1"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"kappa": 0.0}, "kappa=0.0"),
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"clip": -5.0}, "clip=-5.0"),
        ({"window": 0}, "window=0"),
        ({"bound": 0}, "bound=0"),
    ],
)
def test_a_bad_value_is_refused(options, said):
    with pytest.raises(pg.UsageError, match=said):
        pg.GEM(**options)


def test_staleness_counts_what_landed_between_the_pull_and_the_commit():
    run = serial(pg.GEM(), 2, stolen=True, kind=Holding)
    run.start()
    run.step(0)  # worker 0 commits; worker 1 has begun at clock 0
    run.holds = True
    run.step(0)  # worker 0 goes on to its next commit: it pulls at clock 1
    run.holds = False
    run.step(1)  # clock 2
    run.let_go(0)  # clock 3; it adopts what it pulled at 1
    assert run.applied[-1].staleness == 1
    run.step(0)
    assert run.applied[-1].version == 2
    assert run.applied[-1].staleness == 1
