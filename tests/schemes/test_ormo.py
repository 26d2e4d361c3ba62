"""OrMo: every gradient enters the momentum as if it had come in its turn."""

from __future__ import annotations

import pytest
import torch

import paragrad as pg
from tests.schemes.golden import center_of, near, plain, run, send


def test_six_commits_of_two_workers_by_hand():
    center = center_of(pg.OrMo(momentum=0.5), lr=99.0)  # the center's own optimiser is not used
    send(center, 0, [1.0, 0.0, 0.0], version=0)
    assert near(center.value, 0.9, 2.0, 3.0)
    replies = send(center, 0, [1.0, 0.0, 0.0], version=1)  # ahead of its turn: into the bucket that is open
    assert near(center.value, 0.8, 2.0, 3.0)
    assert near(replies[0].value, 0.8, 2.0, 3.0)
    assert near(center.state.slots["momentum"], 0.2, 0.0, 0.0)
    # clock 2 opens the next bucket: u = 0.1, c - u; the gradient of clock 0 is one bucket late
    send(center, 1, [0.0, 2.0, 0.0], version=0)
    assert near(center.state.slots["momentum"], 0.1, 0.5 * 0.2, 0.0)
    assert near(center.value, 0.7, 2.0 - 1.5 * 0.2, 3.0)
    send(center, 0, [0.0, 0.0, -1.0], version=2)
    assert near(center.value, 0.7, 1.7, 3.1)
    # clock 4: u = (0.05, 0.05, -0.05)
    send(center, 0, [0.0, 0.0, 0.0], version=4)
    assert near(center.value, 0.65, 1.65, 3.15)
    send(center, 1, [4.0, 0.0, 0.0], version=0)  # two buckets late: 1 + 0.5 + 0.25
    assert near(center.state.slots["momentum"], 0.05 + 0.25 * 0.4, 0.05, -0.05)
    assert near(center.value, 0.65 - 1.75 * 0.4, 1.65, 3.15)


def test_the_papers_figure_of_the_momentum_after_ten_gradients_of_four_workers():
    """Figure 1: u₁₀ = β² (4 of g₀) + β (4 of g₄) + 2 of g₈."""
    center = center_of(pg.OrMo(momentum=0.5), workers=4)
    for clock in range(10):
        value = [0.0, 0.0, 0.0]
        value[clock // 4] = 1.0
        send(center, clock % 4, value, version=clock // 4 * 4, lr=1.0)
    assert near(center.state.slots["momentum"], 0.25 * 4, 0.5 * 4, 2.0)


@pytest.mark.parametrize("late", [1, 3, 7])
def test_in_the_end_a_gradient_has_moved_the_center_as_far_whenever_it_came(late):
    ends = []
    for arrives in (0, late):
        center = center_of(pg.OrMo(momentum=0.5), workers=2)
        for clock in range(40):
            send(center, 0, [1.0 if clock == arrives else 0.0, 0.0, 0.0], version=0 if clock == arrives else clock)
        ends.append(center.value[0].item())
    assert ends[0] == pytest.approx(1.0 - 0.1 / (1 - 0.5), abs=1e-5)
    assert ends[1] == pytest.approx(ends[0], abs=1e-5)


@pytest.mark.parametrize("momentum", [0.9, 0.5, 0.0])
def test_one_worker_is_torchs_sgd_with_momentum(momentum):
    assert torch.allclose(run(pg.OrMo(momentum=momentum), 1).center.value, plain(momentum=momentum), atol=1e-12)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_gradients_that_come_in_rounds_are_synchronous_sgd_with_momentum(workers):
    generator = torch.Generator().manual_seed(0)
    center = center_of(pg.OrMo(momentum=0.9), workers=workers)
    parameter = torch.nn.Parameter(center.value.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    for _ in range(6):
        clock = center.clock
        slopes = [torch.randn(3, dtype=torch.float64, generator=generator) for _ in range(workers)]
        for worker, slope in enumerate(slopes):
            send(center, worker, slope.tolist(), version=clock, lr=0.1)
        parameter.grad = torch.stack(slopes).sum(0)
        optimizer.step()
        assert torch.allclose(center.value, parameter.detach(), atol=1e-12)


def test_workers_in_turn_are_never_late():
    """Each gradient of n equal workers comes in the bucket it belongs to: u is the plain momentum of their sums."""
    center = center_of(pg.OrMo(momentum=0.5), workers=3)
    for clock in range(9):
        send(center, clock % 3, [1.0, 0.0, 0.0], version=max(0, clock - 2), lr=1.0)
    assert near(center.state.slots["momentum"], 3 + 0.5 * 3 + 0.25 * 3, 0.0, 0.0)


def test_it_steps_with_the_rate_of_the_commit():
    center = center_of(pg.OrMo())
    send(center, 0, [1.0, 1.0, 1.0], lr=0.25)
    assert near(center.value, 0.75, 1.75, 2.75)


def test_without_momentum_it_is_downpour():
    assert torch.allclose(*(run(scheme, 3).center.value for scheme in (pg.OrMo(momentum=0.0), pg.Downpour())), atol=1e-13)


def test_its_docstring_says_that_the_optimiser_must_be_plain_sgd():
    assert "the optimiser must be plain SGD" in pg.OrMo.__doc__


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"momentum": 1.0}, "momentum=1.0, but OrMo needs 0 <= momentum < 1"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"window": 0}, "window=0"),
        ({"bound": 0}, "bound=0"),
    ],
)
def test_a_bad_value_is_refused(options, said):
    with pytest.raises(pg.UsageError, match=said):
        pg.OrMo(**options)


def test_an_optimiser_without_a_rate_is_refused():
    with pytest.raises(pg.UsageError, match=r"the optimiser's learning rate, which is nan\. Take an optimiser that has an lr"):
        send(center_of(pg.OrMo()), 0, [1.0, 1.0, 1.0], lr=float("nan"))
