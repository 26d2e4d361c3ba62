"""The edge of stability of equal workers in turn: the formula, the recursion, and the real center and workers agree."""

from __future__ import annotations

import math

import pytest
import torch

import paragrad as pg
from paragrad.analysis.stability import edge, find_edge, grows
from paragrad.core.job import Job
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial
from paragrad.errors import UsageError
from paragrad.laws.bowl import SIZE, Bowl


@pytest.mark.parametrize("workers", range(1, 17))
def test_bisection_finds_the_edge(workers):
    assert find_edge(workers) == pytest.approx(edge(workers), abs=1e-5)


def test_the_edge_of_few_workers_is_known():
    assert edge(1) == pytest.approx(2)
    assert edge(2) == pytest.approx(1)
    assert edge(3) == pytest.approx((math.sqrt(5) - 1) / 2)


@pytest.mark.parametrize("workers", [1, 3, 6])
def test_the_leaps_of_the_recursion_are_its_updates(workers):
    for product in (0.97 * edge(workers), 1.03 * edge(workers)):
        centers = [1.0] * workers
        for _ in range(4000):
            centers.append(centers[-1] - product * centers[-workers])
        assert (max(abs(c) for c in centers[-100:]) > 1) == grows(workers, product)


@pytest.mark.parametrize("workers", [1, 4])
def test_the_real_center_and_workers_have_the_same_edge(workers):
    def sizes(rate: float) -> tuple[float, float]:
        """The largest center around update 300, and around update 900."""
        source, plan = Arrays(torch.zeros(100, SIZE, dtype=torch.float64)), Plan(rows=100, batch_size=1, epochs=9)
        curvature = torch.ones(SIZE, dtype=torch.float64)
        job = Job(pg.Downpour(), lambda device: Bowl(lr=rate, curvature=curvature), source, None, plan, 100)
        run = Serial(job, workers, stolen=True)
        path: list[float] = []
        run.center.applied = lambda commit: path.append(float(run.center.value.abs().max()))
        run.run()
        return max(path[275:325]), max(path[850:])

    early, late = sizes(0.97 * edge(workers))
    assert late < 0.5 * early
    early, late = sizes(1.03 * edge(workers))
    assert late > 2 * early


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="workers=0"):
        edge(0)
    with pytest.raises(UsageError, match="tolerance=0"):
        find_edge(2, tolerance=0)
