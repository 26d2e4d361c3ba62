"""DeanDownpour against algorithm 7.1 of Dean et al., written out as a plain loop."""

from __future__ import annotations

import pytest
import torch

import paragrad as pg
from paragrad.data.plan import Plan
from paragrad.laws.bowl import Bowl
from paragrad.models import builtin
from tests.schemes.golden import bowl_rows, center_of, close, commit, near, serial

ROWS, BATCH, LR, GAMMA = 48, 2, 0.05, 0.1


def serial_of(scheme, workers, *, lr=LR):
    return serial(scheme, workers, rows=ROWS, epochs=1, batch=BATCH, lr=lr, stolen=True)


def by_the_paper(workers, n_push, n_fetch):
    """Workers in turn, each doing n_push steps, then pushing; a fetch whenever its own step count divides by n_fetch."""
    source, plan = bowl_rows(ROWS), Plan(ROWS, BATCH, 1, 0)
    bowl = Bowl(lr=LR)
    center, squares = bowl.weights.clone(), torch.zeros(7, dtype=torch.float64)
    mine = [center.clone() for _ in range(workers)]
    steps = [0] * workers
    leased = [list(range(k * n_push, (k + 1) * n_push)) for k in range(workers)]
    free = workers * n_push
    while any(leased):
        for k in range(workers):
            accrued = torch.zeros_like(center)
            for position in leased[k]:
                if steps[k] % n_fetch == 0 and position != leased[k][0]:  # at the beginning it has the answer of its push
                    mine[k] = center.clone()
                batch = source.batch(plan.rows_of(position))
                gradient = (bowl.curvature * (mine[k] - batch)).mean(0)
                accrued += gradient
                mine[k] -= LR * gradient
                steps[k] += 1
            if not leased[k]:
                continue
            squares += accrued**2
            center = center - GAMMA * accrued / (squares.sqrt() + 1e-10)
            if steps[k] % n_fetch == 0:
                mine[k] = center.clone()
            leased[k] = list(range(free, min(free + n_push, plan.positions)))
            free = min(free + n_push, plan.positions)
    return center


def test_three_numbers_by_hand():
    center = center_of(pg.DeanDownpour(rate=0.5))
    commit(center, 0, [2.0, -1.0, 0.0])
    # s = (4, 1, 0); c = (1, 2, 3) - 0.5 (2/2, -1/1, 0)
    assert near(center.value, 0.5, 2.5, 3.0)
    commit(center, 1, [0.0, -1.0, 3.0])
    # s = (4, 2, 9); c = (0.5, 2.5, 3) - 0.5 (0, -1/√2, 3/3)
    assert near(center.value, 0.5, 2.5 + 0.5 / 2**0.5, 2.5)


def test_one_worker_that_fetches_inside_its_windows():
    end = serial_of(pg.DeanDownpour(window=4, fetch=2, rate=GAMMA), 1).run().value
    assert close(end, by_the_paper(1, 4, 2))


@pytest.mark.parametrize(("push", "fetch"), [(1, 1), (4, 4), (2, 4), (1, 3)])
def test_one_worker_that_fetches_with_its_answers(push, fetch):
    end = serial_of(pg.DeanDownpour(window=push, fetch=fetch, rate=GAMMA), 1).run().value
    assert close(end, by_the_paper(1, push, fetch))


@pytest.mark.parametrize(("push", "fetch"), [(1, 1), (4, 2), (6, 3), (4, 4), (2, 4), (2, 3)])
def test_two_workers_in_turn(push, fetch):
    end = serial_of(pg.DeanDownpour(window=push, fetch=fetch, rate=GAMMA), 2).run().value
    assert close(end, by_the_paper(2, push, fetch))


def test_without_fetch_the_center_comes_with_each_answer():
    one, other = pg.DeanDownpour(window=3, rate=GAMMA), pg.DeanDownpour(window=3, fetch=3, rate=GAMMA)
    assert torch.equal(serial_of(one, 2).run().value, serial_of(other, 2).run().value)


def test_fetching_inside_windows_makes_a_difference():
    one, other = pg.DeanDownpour(window=4, rate=GAMMA), pg.DeanDownpour(window=4, fetch=2, rate=GAMMA)
    assert not torch.equal(serial_of(one, 2).run().value, serial_of(other, 2).run().value)


def test_one_worker_makes_the_first_updates_alone():
    serial = serial_of(pg.DeanDownpour(warm=5, rate=GAMMA), 3)
    serial.run()
    who = [commit.worker for commit in serial.applied]
    assert who[:5] == [0] * 5
    assert set(who[5:]) == {0, 1, 2}
    assert all(commit.staleness == 0 for commit in serial.applied[:5])


def test_it_trains_with_real_processes_that_fetch_inside_their_windows(tmp_path):
    result = pg.train(
        builtin.build("mlp", (64,), 10),
        "digits",
        holdout=0.2,
        scheme=pg.DeanDownpour(window=4, fetch=2, rate=0.02, warm=3),
        engine=pg.Local(workers=2),
        optimizer="sgd:lr=0.05",
        epochs=6,
        batch_size=16,
        run=pg.Run(out=tmp_path / "run"),
    )
    assert result.accuracy > 0.9


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rate": 0.0}, "rate=0.0"),
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"fetch": 0}, "fetch=0"),
        ({"warm": -1}, "warm=-1"),
        ({"window": 0}, "window=0"),
    ],
)
def test_a_bad_field_is_refused_with_its_value(fields, said):
    with pytest.raises(pg.UsageError, match=said):
        pg.DeanDownpour(**fields)


def test_a_learning_rate_of_zero_is_refused():
    with pytest.raises(pg.UsageError, match="lr above 0"):
        serial_of(pg.DeanDownpour(), 1, lr=0.0).run()
