"""AsyncDiLoCo: delayed Nesterov, and windows as long as a worker is fast."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

import paragrad as pg
from tests.schemes.golden import center_of, near, run, send


def test_four_commits_of_delayed_nesterov_by_hand():
    center = center_of(pg.AsyncDiLoCo(window=1, outer_lr=0.5, outer_momentum=0.5, delay=2, c=0.25))
    send(center, 0, [-4.0, 0.0, 0.0])
    # Δ = 4, v = 0: c - 0.5 (4 / 2)
    assert near(center.value, 0.0, 2.0, 3.0)
    send(center, 1, [-2.0, 8.0, 0.0])
    # v = (4 + 2, -8) / 2 = (3, -4), share 1 - 0.25: c - 0.5 (0.75 · 0.5 v + Δ / 2)
    assert near(center.value, 0.0 - 0.5 * (0.375 * 3 + 1), 2.0 - 0.5 * (0.375 * -4 - 4), 3.0)
    first, second = center.value[:2].tolist()
    send(center, 0, [-4.0, 0.0, 0.0])
    # between two updates: c - 0.5 (0.25 · 0.5 v + Δ / 2)
    assert near(center.value, first - 0.5 * (0.125 * 3 + 2), second - 0.5 * (0.125 * -4), 3.0)
    first, second = center.value[:2].tolist()
    send(center, 1, [0.0, 0.0, 2.0])
    # v = 0.5 v + (4, 0, -2) / 2 = (3.5, -2, -1); the sum began anew
    assert near(center.value, first - 0.5 * 0.375 * 3.5, second - 0.5 * 0.375 * -2, 3.0 - 0.5 * (-0.375 - 1))


def test_with_delay_1_it_is_nesterov_at_every_commit():
    center = center_of(pg.AsyncDiLoCo(window=1, outer_lr=0.5, outer_momentum=0.5, delay=1))
    send(center, 0, [2.0, 0.0, 0.0])
    assert near(center.value, 1.0 + 0.5 * (2 + 0.5 * 2), 2.0, 3.0)
    send(center, 1, [2.0, 0.0, 0.0])
    assert near(center.value, 2.5 + 0.5 * (2 + 0.5 * 3), 2.0, 3.0)


@pytest.mark.parametrize("delay", [1, None])
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.07, 0.5), (1.0, 0.0)])
def test_one_worker_is_diloco_to_the_bit(lr, momentum, delay):
    schemes = (
        pg.AsyncDiLoCo(window=3, outer_lr=lr, outer_momentum=momentum, delay=delay),
        pg.DiLoCo(window=3, outer_lr=lr, outer_momentum=momentum),
    )
    assert torch.equal(*(run(scheme, 1).center.value for scheme in schemes))


@pytest.mark.parametrize("c", [0.0, 0.2, 0.5])
def test_n_commits_from_one_center_are_one_nesterov_step_on_their_mean_but_for_what_c_keeps_back(c):
    ends = []
    for scheme in (pg.AsyncDiLoCo(window=1, outer_lr=0.5, delay=2, c=c), pg.DiLoCo(window=1, outer_lr=0.5)):
        center = center_of(scheme)
        send(center, 0, [1.0, -2.0, 0.5], version=0)
        send(center, 1, [3.0, 0.0, 0.5], version=0)
        ends.append(center.value.clone())
    # with c > 0 a part of the new momentum comes with the commits of the next round
    gap = c * 0.9 * torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64) * 0.5
    assert torch.allclose(ends[0] + gap, ends[1], atol=1e-14)


def test_the_delay_is_the_number_of_workers_if_not_given():
    ends = [run(pg.AsyncDiLoCo(window=2, outer_lr=0.5, delay=delay), 3).center.value for delay in (None, 3, 1)]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


# -- DyLU -----------------------------------------------------------------------------------------------------------


def steps(speeds, worker, *, working=None, **options):
    center = SimpleNamespace(speeds=speeds, working=range(len(speeds)) if working is None else working)
    return pg.AsyncDiLoCo(window=50, dylu=True, **options).steps(center, worker)


def test_a_worker_of_half_the_speed_has_half_the_window():
    assert [steps([8.0, 4.0, 3.0], k) for k in range(3)] == [50, 25, 18]


def test_the_slowest_still_makes_a_step():
    assert steps([1000.0, 1.0], 1) == 1


def test_a_worker_that_has_not_been_seen_has_a_full_window():
    assert steps([8.0, 0.0], 1) == 50
    assert steps([0.0, 0.0], 1) == 50


def test_a_worker_that_is_gone_sets_no_pace():
    assert steps([80.0, 4.0, 8.0], 1, working=[1, 2]) == 25


def test_without_dylu_all_windows_are_full():
    center = SimpleNamespace(speeds=[8.0, 4.0], working=[0, 1])
    assert pg.AsyncDiLoCo(window=50).steps(center, 1) == 50


def test_the_center_hands_out_the_shorter_windows():
    center = center_of(pg.AsyncDiLoCo(window=8, dylu=True))
    fast = send(center, 0, [0.1, 0.1, 0.1], steps=8, seconds=1.0)
    slow = send(center, 1, [0.1, 0.1, 0.1], steps=8, seconds=4.0)
    assert (fast[0].steps, slow[1].steps) == (8, 2)
    assert len(slow[1].batches) == 2


def test_an_engine_that_measures_nothing_is_refused():
    with pytest.raises(pg.UsageError, match="DyLU needs an engine that measures"):
        send(center_of(pg.AsyncDiLoCo(window=8, dylu=True)), 0, [0.1, 0.1, 0.1], seconds=0.0)


# -- what is refused, and what is warned of -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"outer_lr": 0.0}, "outer_lr=0.0"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0, but AsyncDiLoCo needs outer_lr > 0 and 0 <= outer_momentum < 1"),
        ({"delay": 0}, "delay=0, but it must be 1 or more"),
        ({"delay": 4, "c": 0.3}, "c=0.3, but the momentum is distributed with 0 <= c <= 1 / delay = 0.25"),
        ({"c": -0.1}, "c=-0.1"),
        ({"window": 0}, "window=0"),
        ({"bound": 0}, "bound=0"),
    ],
)
def test_a_bad_value_is_refused(options, said):
    with pytest.raises(pg.UsageError, match=said):
        pg.AsyncDiLoCo(**options)


@pytest.mark.parametrize(
    ("scheme", "workers", "said"),
    [
        (pg.AsyncDiLoCo(delay=1), 4, "outer_lr below 0.043 is stable, and with delay=4 outer_lr below 0.71"),
        (pg.AsyncDiLoCo(delay=1), 8, "outer_lr below 0.016 is stable"),
        (pg.AsyncDiLoCo(outer_lr=0.7), 8, "outer_lr=0.7, outer_momentum=0.9 and delay=8 is unstable"),
        (pg.AsyncDiLoCo(c=0.5), 4, "c up to 0.25"),
    ],
)
def test_an_unstable_choice_is_warned_of_with_the_rate_that_holds(scheme, workers, said):
    assert said in " ".join(scheme.warnings(pg.SchemePlan(workers)))


@pytest.mark.parametrize("delay", [1, 2, 8])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_rate_that_is_advised_is_not_warned_of_in_its_turn(delay, momentum):
    (warning,) = pg.AsyncDiLoCo(outer_lr=5.0, delay=delay, outer_momentum=momentum).warnings(pg.SchemePlan(8))
    advised, other = (float(number) for number in re.findall(r"lr below ([\d.]+\d)", warning))
    assert pg.AsyncDiLoCo(outer_lr=advised, delay=delay, outer_momentum=momentum).warnings(pg.SchemePlan(8)) == []
    assert pg.AsyncDiLoCo(outer_lr=other, delay=8, outer_momentum=momentum).warnings(pg.SchemePlan(8)) == []
    assert pg.AsyncDiLoCo(outer_lr=1.2 * advised, delay=delay, outer_momentum=momentum).warnings(pg.SchemePlan(8)) != []


@pytest.mark.parametrize("workers", [1, 2, 4, 16, 64])
def test_the_defaults_are_not_warned_of(workers):
    assert pg.AsyncDiLoCo().warnings(pg.SchemePlan(workers)) == []


@pytest.mark.parametrize(("lr", "stable"), [(0.038, True), (0.055, False)])
def test_the_warning_is_true(lr, stable):
    """Windows that come to rest; four workers in turn, momentum at every commit: 0.046 is the limit."""
    scheme = pg.AsyncDiLoCo(window=4, outer_lr=lr, delay=1)
    serial = run(scheme, 4, lr=0.9, flat=True, rows=400, epochs=40, commits=800)
    assert (float(serial.center.value.abs().max()) < 0.1) == stable
    assert (scheme.warnings(pg.SchemePlan(4)) == []) == stable
