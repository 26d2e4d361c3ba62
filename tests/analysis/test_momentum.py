"""Implicit momentum is 1 - 1/n on the mean of many runs, and the simulation that says so is the real center and worker."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.analysis import momentum
from paragrad.core.job import Job
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial
from paragrad.errors import UsageError
from paragrad.laws.bowl import SIZE, Bowl

CURVATURE = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64)


def serial(rows: torch.Tensor, workers: int, *, rate: float, epochs: int, seed: int = 0) -> tuple[Serial, list[torch.Tensor]]:
    """The real center and workers on a bowl around the mean of the rows, and the list that the path is written to."""
    plan = Plan(rows=len(rows), batch_size=1, epochs=epochs, seed=seed)
    job = Job(pg.Downpour(), lambda device: Bowl(lr=rate), Arrays(rows), None, plan, len(rows))
    run = Serial(job, workers, stolen=True)
    path = [run.center.value.clone()]
    run.center.applied = lambda commit: path.append(run.center.value.clone())
    run.start()
    return run, path


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_a_row_of_the_simulation_is_a_run_of_the_real_center_and_workers(workers):
    dice, rate = random.Random(workers), 0.3
    order = [dice.randrange(workers) for _ in range(120)]
    run, real = serial(torch.zeros(60, SIZE, dtype=torch.float64), workers, rate=rate, epochs=3)
    for rank in order:
        run.step(rank)
    # The run stands in the middle of three: rows do not see each other.
    start = torch.stack([torch.ones(SIZE, dtype=torch.float64), real[0], -real[0]])
    rows = [torch.tensor([0, rank, workers - 1 - rank]) for rank in order]
    simulated = [center[1] for center in momentum.walk(start, rows, workers=workers, rate=rate, curvature=Bowl().curvature)]
    assert len(real) == len(simulated) == 121
    assert torch.allclose(torch.stack(real), torch.stack(simulated), rtol=0, atol=1e-12)


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
def test_the_momentum_of_asynchrony_is_one_less_one_nth(workers):
    setting = {"updates": 8 * workers + 8, "rate": 1 / workers, "curvature": CURVATURE, "seed": 7}
    means = momentum.quadratic_means(workers, 2000, **setting)
    found = momentum.regress(means, CURVATURE * means)
    assert found.value == pytest.approx(1 - 1 / workers, abs=4 * found.error + 1e-9)
    assert found.error < 0.006
    assert found.rate * workers**2 == pytest.approx(1, abs=4 * found.rate_error * workers**2 + 1e-9)


def test_it_does_not_depend_on_the_rate_or_the_curvatures():
    for rate, curvature in ((0.05, [0.3, 2.0]), (0.2, [0.2, 0.4, 0.9, 1.1])):
        h = torch.tensor(curvature, dtype=torch.float64)
        means = momentum.quadratic_means(4, 2000, updates=60, rate=rate, curvature=h, seed=1)
        found = momentum.regress(means, h * means)
        assert found.value == pytest.approx(0.75, abs=4 * found.error)


def test_least_squares_on_few_runs_reads_too_little_and_instruments_do_not():
    means = momentum.quadratic_means(64, 400, updates=264, rate=1 / 64, curvature=CURVATURE, seed=3)
    plain = momentum.regress(means, CURVATURE * means, lagged=False)
    lagged = momentum.regress(means, CURVATURE * means)
    assert plain.value < 63 / 64 - 4 * plain.error
    assert lagged.value == pytest.approx(63 / 64, abs=4 * lagged.error)


def test_the_mean_path_obeys_the_law_with_explicit_momentum_too():
    """A path made with known momentum and rate is read exactly."""
    path = [torch.ones(3, dtype=torch.float64)] * 2
    for _ in range(40):
        path.append(path[-1] + 0.6 * (path[-1] - path[-2]) - 0.1 * CURVATURE * path[-1])
    means = torch.stack(path).expand(2, -1, -1)
    for lagged in (False, True):
        found = momentum.regress(means, CURVATURE * means, lagged=lagged)
        assert (found.value, found.rate) == (pytest.approx(0.6), pytest.approx(0.1))


def test_repeated_runs_of_a_model_on_noisy_rows_tell_their_momentum():
    """Linear regression's loss: rows scatter around the optimum, so that mini-batches of one row are noisy gradients."""
    workers, rate, updates = 4, 0.15, 32
    rows = torch.randn(50, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    curvature, paths = Bowl().curvature, []
    for seed in range(60):
        run, path = serial(rows, workers, rate=rate, epochs=1, seed=seed)
        dice = random.Random(seed)
        for _ in range(updates):
            run.step(dice.randrange(workers))
        paths.append(torch.stack(path))
    stacked = torch.stack(paths)
    found = momentum.of_runs(stacked, curvature * (stacked - rows.mean(0)))
    assert momentum.of_runs(stacked, curvature * (stacked - rows.mean(0)), lagged=False).value < found.value
    assert found.value == pytest.approx(0.75, abs=4 * found.error)
    assert found.error < 0.08
    assert found.rate * workers / rate == pytest.approx(1, abs=4 * found.rate_error * workers / rate)


def test_gradients_along_a_path_are_those_of_autograd_over_all_rows():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    inputs, target = torch.randn(30, 3, dtype=torch.float64), torch.randint(2, (30,))
    paths = torch.randn(5, 40, len(before), dtype=torch.float64)  # more points than are taken at once
    found = momentum.gradients_along(paths, module, nn.CrossEntropyLoss(), inputs, target)
    assert found.shape == paths.shape
    assert torch.equal(nn.utils.parameters_to_vector(module.parameters()), before)
    for run, update in ((0, 0), (2, 17), (4, 39)):
        nn.utils.vector_to_parameters(paths[run, update], module.parameters())
        loss = nn.functional.cross_entropy(module(inputs), target)
        expected = nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(module.parameters())))
        assert torch.allclose(found[run, update], expected, rtol=0, atol=1e-12)


def test_gradients_along_the_path_of_another_module_are_refused():
    with pytest.raises(UsageError, match="7 parameters per point, but the module has 8"):
        momentum.gradients_along(
            torch.zeros(2, 3, 7), nn.Linear(3, 2), nn.CrossEntropyLoss(), torch.zeros(1, 3), torch.zeros(1)
        )


def descent(rate: float, mu: float, steps: int = 60) -> torch.Tensor:
    """Synchronous descent with explicit momentum."""
    path, velocity = [torch.ones(3, dtype=torch.float64)], torch.zeros(3, dtype=torch.float64)
    for _ in range(steps):
        velocity = mu * velocity - rate * CURVATURE * path[-1]
        path.append(path[-1] + velocity)
    return torch.stack(path)


def test_yellowfin_reads_the_momentum_of_a_synchronous_run():
    path = descent(0.05, 0.7)
    read = momentum.yellowfin(path, CURVATURE * path, rate=0.05)
    assert len(read) == len(path) - 2
    assert torch.allclose(read, torch.full_like(read, 0.7), atol=1e-9)


@pytest.mark.parametrize(("claimed", "read"), [(1, 0.0), (2, 0.495), (8, 0.865), (64, 0.974)])
def test_yellowfin_reads_the_number_of_workers_that_it_was_told(claimed, read):
    """Plain descent of one process, no momentum, no workers."""
    path = descent(0.02, 0.0)
    assert float(momentum.yellowfin(path, CURVATURE * path, rate=0.02 / claimed).median()) == pytest.approx(read, abs=2e-3)


def test_coordinates_that_stand_still_do_not_count():
    path = descent(0.05, 0.7)
    path[:, 1] = 1.0
    gradients = CURVATURE * path
    gradients[:, 1] = 0.0
    assert float(momentum.yellowfin(path, gradients, rate=0.05)[-1]) == pytest.approx(0.7)


def test_what_cannot_be_measured_is_refused():
    one = torch.tensor([0.5], dtype=torch.float64)
    means = momentum.quadratic_means(1, 20, updates=20, rate=0.5, curvature=one, seed=0)
    with pytest.raises(UsageError, match="two or more curvatures"):
        momentum.regress(means, one * means)
    with pytest.raises(UsageError, match="runs=30"):
        momentum.quadratic_means(2, 30, updates=20, rate=0.5, curvature=CURVATURE, seed=0)
    with pytest.raises(UsageError, match="workers: 0"):
        momentum.quadratic_means(0, 40, updates=20, rate=0.5, curvature=CURVATURE, seed=0)
    with pytest.raises(UsageError, match="do not match"):
        momentum.regress(torch.zeros(2, 9, 3), torch.zeros(2, 9, 2))
    with pytest.raises(UsageError, match="do not match"):
        momentum.yellowfin(torch.zeros(2, 3), torch.zeros(2, 3), rate=0.1)
    with pytest.raises(UsageError, match="run, update, parameter"):
        momentum.of_runs(torch.zeros(4, 3), torch.zeros(4, 3))
    with pytest.raises(UsageError, match="runs: 1"):
        momentum.of_runs(torch.zeros(1, 9, 3), torch.zeros(1, 9, 3))
