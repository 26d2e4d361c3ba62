"""DynSGD: c <- c + d / (τ + 1)."""

from __future__ import annotations

import math

import pytest
import torch

import paragrad as pg
from paragrad.schemes.traits import is_scaled_movement
from tests.schemes.golden import center_of, near, run, send


def test_a_movement_is_divided_by_its_staleness_plus_one():
    center = center_of(pg.DynSGD())
    send(center, 0, [0.5, -1.0, 0.25], version=0)
    assert near(center.value, 1.5, 1.0, 3.25)
    replies = send(center, 1, [4.0, 2.0, -1.0], version=0)
    assert near(center.value, 3.5, 2.0, 2.75)
    assert near(replies[1].value, 3.5, 2.0, 2.75)
    send(center, 0, [3.0, 3.0, 3.0], version=0)
    assert near(center.value, 4.5, 3.0, 3.75)


def test_it_is_exchanged_in_one_pass():
    assert is_scaled_movement(pg.DynSGD())


def test_without_staleness_it_is_downpour():
    ends = [run(scheme, 1, epochs=2) for scheme in (pg.DynSGD(window=3), pg.Downpour(window=3))]
    assert torch.equal(ends[0].center.value, ends[1].center.value)
    assert all(commit.staleness == 0 for commit in ends[0].applied)


def test_with_staleness_it_is_not_downpour():
    first, second = (run(scheme, 3, commits=6).center.value for scheme in (pg.DynSGD(window=1), pg.Downpour()))
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_equal_workers_are_stable_just_below_the_rate_of_the_docstring_and_not_above_it(workers):
    limit = 2 * workers * math.sin(math.pi / (4 * workers - 2))
    assert limit >= math.pi / 2
    ends = []
    for share in (0.9, 1.1):
        rate = share * limit / 1.5  # the bowl's steepest direction has curvature 1.5
        serial = run(pg.DynSGD(window=1), workers, lr=rate, flat=True, rows=400, epochs=8)
        ends.append(float(serial.center.value.abs().max()))
    assert ends[0] < 1e-2
    assert ends[1] > 10


def test_it_holds_where_downpour_diverges():
    ends = [
        float(run(scheme, 8, lr=0.5, flat=True, rows=400, epochs=4).center.value.abs().max())
        for scheme in (pg.DynSGD(window=1), pg.Downpour())
    ]
    assert ends[0] < 1e-3
    assert ends[1] > 1e3


@pytest.mark.parametrize(("options", "said"), [({"window": 0}, "window=0"), ({"bound": 0}, "bound=0")])
def test_a_bad_value_is_refused(options, said):
    with pytest.raises(pg.UsageError, match=said):
        pg.DynSGD(**options)


def test_nothing_is_known_to_diverge():
    assert pg.DynSGD(window=50).warnings(pg.SchemePlan(32)) == []
