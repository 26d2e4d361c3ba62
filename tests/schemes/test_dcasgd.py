"""DCASGD: a step on g + λ g² (c - a)."""

from __future__ import annotations

import pytest
import torch

import paragrad as pg
from tests.schemes.golden import center_of, near, plain, run, send


def test_a_late_gradient_is_compensated_for_what_the_center_did():
    center = center_of(pg.DCASGD(strength=0.5), lr=0.1)
    send(center, 0, [10.0, 0.0, -10.0], version=0)
    assert near(center.value, 0.0, 2.0, 4.0)  # no delay: plain SGD
    replies = send(center, 1, [2.0, 3.0, 1.0], version=0)
    # c - a = (-1, 0, 1): g + 0.5 g² (c - a) = (0, 3, 1.5)
    assert near(center.value, 0.0, 1.7, 3.85)
    assert near(replies[1].value, 0.0, 1.7, 3.85)
    send(center, 1, [2.0, 3.0, 1.0])  # it has been given the center as it is now
    assert near(center.value, -0.2, 1.4, 3.75)


def test_the_adaptive_form_divides_by_the_root_of_the_mean_square():
    center = center_of(pg.DCASGD(adaptive=True), lr=0.1)
    send(center, 0, [10.0, 0.0, -10.0], version=0)
    assert near(center.value, 0.0, 2.0, 4.0)
    send(center, 1, [2.0, 3.0, 1.0], version=0)
    squares = [0.95 * 0.05 * g**2 + 0.05 * h**2 for g, h in ((10, 2), (0, 3), (-10, 1))]
    expected = [g + 2 / (m + 1e-7) ** 0.5 * g**2 * d for g, m, d in zip((2, 3, 1), squares, (-1, 0, 1), strict=True)]
    assert near(center.value, *(c - 0.1 * g for c, g in zip((0.0, 2.0, 4.0), expected, strict=True)))
    assert near(center.state.slots["squares"], *squares)


@pytest.mark.parametrize(("adaptive", "paper"), [(False, 0.04), (True, 2.0)])
def test_the_papers_strength_is_the_default(adaptive, paper):
    schemes = (pg.DCASGD(adaptive=adaptive), pg.DCASGD(adaptive=adaptive, strength=paper))
    ends = [run(scheme, 3).center.value for scheme in schemes]
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], run(pg.DCASGD(adaptive=adaptive, strength=2 * paper), 3).center.value)


def test_the_decay_has_its_effect():
    ends = [run(pg.DCASGD(adaptive=True, decay=decay), 3).center.value for decay in (0.95, 0.5)]
    assert not torch.equal(*ends)


@pytest.mark.parametrize("adaptive", [False, True])
def test_without_delay_it_is_sgd(adaptive):
    assert torch.allclose(run(pg.DCASGD(adaptive=adaptive), 1).center.value, plain(), atol=1e-13)


def test_without_strength_it_is_asynchronous_sgd():
    ends = [run(scheme, 3).center.value for scheme in (pg.DCASGD(strength=0.0), pg.Downpour())]
    assert torch.allclose(*ends, atol=1e-13)
    assert not torch.allclose(ends[1], run(pg.DCASGD(strength=1.0), 3).center.value, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strength": -0.1}, "strength=-0.1, but it must be 0 or more; the paper takes 0.04"),
        ({"strength": float("nan")}, "strength=nan"),
        ({"decay": 1.0}, "decay=1.0, but a running mean needs 0 <= decay < 1"),
        ({"decay": -0.5}, "decay=-0.5"),
        ({"window": 0}, "window=0"),
        ({"bound": 0}, "bound=0"),
    ],
)
def test_a_bad_value_is_refused(options, said):
    with pytest.raises(pg.UsageError, match=said):
        pg.DCASGD(**options)
