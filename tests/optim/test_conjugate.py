"""Conjugate gradients: n dimensions in n steps, curved valleys, restarts, and the same under a scheme as in a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paragrad as pg
from paragrad.core.job import Job
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial
from paragrad.learners.torch import TorchLearner
from paragrad.optim.conjugate import Beta, ConjugateGradient
from paragrad.optim.linesearch import Point, search
from paragrad.optim.optimizer import factory

FORMULAS = get_args(Beta)


def quadratic(size: int, condition: float, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix with that condition, a right-hand side and a start."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    eigenvalues = torch.logspace(0, math.log10(condition), size, dtype=torch.float64)
    b, start = torch.randn(2, size, dtype=torch.float64, generator=generator)
    return (basis * eigenvalues) @ basis.T, b, start


def closure_of(w: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        w.grad = None
        loss = f(w)
        loss.backward()
        return loss.detach()

    return closure


def left_by_the_textbook(matrix: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> float:
    """The linear method in as many steps as there are dimensions: the share of the gradient that rounding leaves."""
    residual = b - matrix @ w
    first, direction = residual.norm(), residual.clone()
    for _ in range(len(b)):
        if residual.norm() <= 1e-15 * first:
            break
        square = residual @ residual
        w = w + square / (direction @ matrix @ direction) * direction
        residual = b - matrix @ w
        direction = residual + (residual @ residual) / square * direction
    return float(residual.norm() / first)


@pytest.mark.parametrize("beta", FORMULAS)
@pytest.mark.parametrize("condition", [1.0, 10.0, 100.0, 1e4])
@pytest.mark.parametrize("size", [1, 2, 5, 10, 20])
def test_n_dimensions_take_n_steps(beta: Beta, condition: float, size: int) -> None:
    """To rounding: what the linear method with its exact steps leaves, which loses conjugacy on bad conditions, too. What a
    single seed leaves goes by how a processor rounds; the medians of several lie within a factor of 7 (60 seeds)."""
    left, textbook = [], []
    for seed in range(9):
        matrix, b, start = quadratic(size, condition, seed)
        w = nn.Parameter(start.clone())
        optimizer = ConjugateGradient([w], beta=beta)
        closure = closure_of(w, lambda w, matrix=matrix, b=b: 0.5 * w @ matrix @ w - b @ w)
        for _ in range(size):
            optimizer.step(closure)
        assert optimizer.state[w]["evaluations"] <= 6 * size + 5
        closure()
        left.append(float(w.grad.norm() / (b - matrix @ start).norm()))
        textbook.append(left_by_the_textbook(matrix, b, start))
    assert median(left) <= max(1e-10, 100 * median(textbook))
    assert condition > 10 or max(left) <= 1e-7


@pytest.mark.parametrize("beta", FORMULAS)
def test_rosenbrock_takes_at_most_250_evaluations(beta: Beta) -> None:
    w = nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
    optimizer = ConjugateGradient([w], beta=beta)
    closure = closure_of(w, lambda w: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2)
    while float((w.detach() - 1).abs().max()) > 1e-8:
        optimizer.step(closure)
        assert optimizer.state[w]["evaluations"] <= 250


@pytest.mark.parametrize("beta", FORMULAS)
def test_ten_dimensions_of_rosenbrock_take_at_most_160_steps(beta: Beta) -> None:
    w = nn.Parameter(torch.full((10,), -0.5, dtype=torch.float64))
    optimizer = ConjugateGradient([w], beta=beta)

    def valley(w: torch.Tensor) -> torch.Tensor:
        return ((1 - w[:-1]) ** 2 + 100 * (w[1:] - w[:-1] ** 2) ** 2).sum()

    closure = closure_of(w, valley)
    losses = [float(optimizer.step(closure)) for _ in range(160)]
    assert all(later <= earlier for earlier, later in pairwise(losses))
    assert losses[-1] < 1e-12


# -- restarts ---------------------------------------------------------------------------------------------------


def bowl(restart: int | None = None) -> tuple[nn.Parameter, ConjugateGradient, Callable[[], torch.Tensor]]:
    matrix, b, start = quadratic(6, 50.0, 4)
    w = nn.Parameter(start)
    return (
        w,
        ConjugateGradient([w], beta="fletcher-reeves", restart=restart),
        closure_of(w, lambda w: 0.5 * w @ matrix @ w - b @ w),
    )


def is_steepest(w: nn.Parameter, optimizer: ConjugateGradient) -> bool:
    state = optimizer.state[w]
    return torch.equal(state["direction"], -state["gradient"])


def test_the_direction_is_begun_anew_after_so_many_steps() -> None:
    w, optimizer, closure = bowl(restart=2)
    steepest = []
    for _ in range(6):
        optimizer.step(closure)
        steepest.append(is_steepest(w, optimizer))
    assert steepest == [True, False] * 3


def test_gradients_that_are_no_longer_conjugate_begin_anew() -> None:
    w, optimizer, closure = bowl()
    optimizer.step(closure)
    optimizer.step(closure)
    assert not is_steepest(w, optimizer)
    with torch.no_grad():
        w.copy_(w + 3.0)  # as when a center has moved it
    optimizer.step(closure)
    assert is_steepest(w, optimizer)


def test_a_direction_that_would_lead_uphill_is_not_taken() -> None:
    w, optimizer, closure = bowl()
    optimizer.step(closure)
    closure()
    state = optimizer.state[w]
    state["direction"] = 1e6 * w.grad.clone()
    # Orthogonal to the gradient, so that nothing but the direction itself tells.
    state["gradient"] = state["gradient"] - w.grad * (state["gradient"] @ w.grad) / (w.grad @ w.grad)
    before = float(closure())
    optimizer.step(closure)
    assert is_steepest(w, optimizer)
    assert float(closure()) < before


def test_at_the_minimum_nothing_moves() -> None:
    w = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = ConjugateGradient([w])
    optimizer.step(closure_of(w, lambda w: (w**2).sum() + 7))
    assert w.tolist() == [0.0, 0.0, 0.0]
    assert optimizer.state[w]["evaluations"] == 1


def test_a_cliff_is_backed_away_from() -> None:
    w = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = ConjugateGradient([w], first=50.0)
    closure = closure_of(w, lambda w: (w - torch.log(w)).sum())  # NaN below 0, the minimum at 1
    for _ in range(8):
        optimizer.step(closure)
    assert abs(float(w.detach()) - 1) < 1e-7


def test_a_loss_that_is_not_finite_is_not_hidden() -> None:
    w = nn.Parameter(torch.tensor([-1.0]))
    ConjugateGradient([w]).step(closure_of(w, lambda w: torch.log(w).sum()))
    assert w.isnan().all()


def test_its_state_goes_on_from_a_state_dict() -> None:
    w, optimizer, closure = bowl()
    for _ in range(3):
        optimizer.step(closure)
    other, fresh, theirs = bowl()
    with torch.no_grad():
        other.copy_(w)
    fresh.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        optimizer.step(closure)
        fresh.step(theirs)
        assert torch.equal(w, other)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta": "polak"}, "beta='polak', but it must be one of fletcher-reeves"),
        ({"restart": 0}, "restart=0"),
        ({"curvature": 0.9}, "curvature=0.9"),
        ({"evaluations": 1}, "evaluations=1"),
        ({"first": 0.0}, r"first=0\.0"),
    ],
)
def test_bad_fields_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(pg.UsageError, match=message):
        ConjugateGradient([nn.Parameter(torch.zeros(1))], **fields)


def test_several_groups_of_parameters_are_refused() -> None:
    one, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    with pytest.raises(pg.UsageError, match="2 groups of parameters"):
        ConjugateGradient([{"params": [one]}, {"params": [other]}])


# -- the line search --------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    minimum=st.floats(1e-3, 1e3),
    bend=st.floats(1e-3, 1e3),
    trial=st.floats(1e-4, 1e4),
    ripple=st.floats(0.0, 0.3),
)
def test_the_strong_wolfe_conditions_hold_where_it_stops(minimum: float, bend: float, trial: float, ripple: float) -> None:
    def at(t: float) -> Point:
        x = t / minimum - 1
        value = bend * (0.5 * x * x + ripple * math.cos(3 * x) / 9)
        return Point(t, value, bend * (x - ripple * math.sin(3 * x) / 3) / minimum)

    seen = 0

    def counted(t: float) -> Point:
        nonlocal seen
        seen += 1
        return at(t)

    start = at(0.0)
    end, found = search(counted, start, trial, curvature=0.1, noise=0.0, most=40)
    assert found
    assert seen <= 40
    assert end.value <= start.value + 1e-4 * end.length * start.slope
    assert abs(end.slope) <= 0.1 * abs(start.slope)


def test_a_line_without_a_minimum_ends_at_the_lowest_point_seen() -> None:
    end, found = search(lambda t: Point(t, -t, -1.0), Point(0.0, 0.0, -1.0), 1.0, curvature=0.1, noise=0.0, most=5)
    assert not found
    assert end.length >= 5.0


# -- under a scheme ---------------------------------------------------------------------------------------------


def net(dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    between = nn.BatchNorm1d(5) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(3, 5), between, nn.Dropout(dropout), nn.Linear(5, 2)).double()


def rows(count: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    return x, (x.sum(1) > 0).long()


@pytest.mark.parametrize("name", ["cg", "cg:beta=fletcher-reeves", "cg:beta=hestenes-stiefel", "lbfgs:lr=0.5"])
def test_one_worker_is_a_plain_loop(name: str) -> None:
    source, plan = Arrays(rows()), Plan(48, 16, 3, 0)
    job = Job(pg.ModelAveraging(window=4), lambda _: TorchLearner(net(), nn.CrossEntropyLoss(), name), source, None, plan, 48)
    found = Serial(job, 1).run().value
    plain = net()
    optimizer = factory(name)(list(plain.parameters()))
    for position in range(plan.positions):
        x, y = source.batch(plan.rows_of(position))

        def closure(x=x, y=y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(plain(x), y)
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
    assert torch.equal(found, nn.utils.parameters_to_vector(plain.parameters()))


def test_every_look_at_a_mini_batch_draws_the_same_and_the_statistics_move_once() -> None:
    learner = TorchLearner(net(dropout=0.5, norm=True), nn.CrossEntropyLoss(), "cg")
    batch, seen = rows(16), []
    learner.module[2].register_forward_hook(lambda module, inputs, output: seen.append((output == 0).detach().clone()))
    other = TorchLearner(net(dropout=0.5, norm=True), nn.CrossEntropyLoss(), "sgd")
    for each in (learner, other):
        torch.manual_seed(5)
        each.step(batch)
        each.collect()
    assert len(seen) > 2
    assert all(torch.equal(mask, seen[0]) for mask in seen)
    assert torch.equal(learner.buffers, other.buffers)
    assert learner.integers.tolist() == [1]


@pytest.mark.parametrize("scheme", [pg.AGN(window=2), pg.AEASGD(window=2, alpha=0.3), pg.ModelAveraging(window=2)])
def test_several_workers_descend(scheme: pg.Scheme) -> None:
    source, plan = Arrays(rows(96)), Plan(96, 24, 4, 0)
    made = []

    def make(device: str) -> TorchLearner:
        made.append(TorchLearner(net(), nn.CrossEntropyLoss(), "cg"))
        return made[-1]

    center = Serial(Job(scheme, make, source, None, plan, 96), 2).run()
    before = made[0].evaluate(source, 96)["loss"]
    made[0].weights.copy_(center.value)
    assert made[0].evaluate(source, 96)["loss"] < 0.7 * before


def test_on_the_vector_engine_workers_are_computed_one_after_another_and_that_is_said(tmp_path, watched) -> None:
    pg.train(
        net(),
        rows(),
        optimizer="cg",
        scheme=pg.AGN(),
        engine=pg.Vector(workers=2),
        batch_size=12,
        run=pg.Run(tmp_path, callbacks=(watched,)),
    )
    said = [event.data["message"] for event in watched.events if event.kind == "warning"]
    assert any("one after another: the optimiser ConjugateGradient has no batched version" in line for line in said)


def test_a_scheme_whose_center_has_gradients_only_refuses_it_before_anything_is_written(tmp_path) -> None:
    with pytest.raises(pg.UsageError, match=r"SyncSGD ships one gradient per step.*modelaveraging"):
        pg.train(net(), rows(), optimizer="lbfgs", scheme=pg.SyncSGD(), batch_size=12, run=pg.Run(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_it_runs_in_processes_of_its_own_by_its_name(tmp_path) -> None:
    data = rows(96)
    result = pg.train(
        net(),
        data,
        validation=data,
        optimizer="cg:beta=polak-ribiere",
        engine=pg.Local(workers=2),
        scheme=pg.ModelAveraging(window=2),
        batch_size=24,
        epochs=4,
        run=pg.Run(tmp_path / "out"),
    )
    assert result.accuracy > 0.9
    assert pg.replay(tmp_path / "out", net(), data, loss=nn.CrossEntropyLoss()).equal
