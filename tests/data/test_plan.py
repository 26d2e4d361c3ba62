"""Laws of the plan: every row once an epoch, and the same rows wherever they are asked for."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paragrad.data.plan import Plan
from paragrad.errors import UsageError

plans = st.builds(
    Plan, rows=st.integers(1, 200), batch_size=st.integers(1, 64), epochs=st.integers(1, 4), seed=st.integers(0, 2**40)
)


@given(plans)
@settings(max_examples=60, deadline=None)
def test_every_row_is_in_exactly_one_batch_of_each_epoch(plan: Plan) -> None:
    for epoch in range(plan.epochs):
        positions = range(epoch * plan.batches, (epoch + 1) * plan.batches)
        rows = np.concatenate([plan.rows_of(position) for position in positions])
        assert sorted(rows.tolist()) == list(range(plan.rows))


@given(plans)
@settings(max_examples=60, deadline=None)
def test_the_size_of_a_batch_is_known_without_its_rows(plan: Plan) -> None:
    sizes = [plan.size_of(position) for position in range(plan.positions)]
    assert sizes == [len(plan.rows_of(position)) for position in range(plan.positions)]
    assert sum(sizes) == plan.rows * plan.epochs


@given(plans, st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_rows_do_not_depend_on_the_order_in_which_batches_are_asked_for(plan: Plan, random) -> None:
    straight = [plan.rows_of(position).tolist() for position in range(plan.positions)]
    other = Plan(plan.rows, plan.batch_size, plan.epochs, plan.seed)
    shuffled = list(range(plan.positions))
    random.shuffle(shuffled)
    assert all(other.rows_of(position).tolist() == straight[position] for position in shuffled)


def test_epochs_and_seeds_are_ordered_differently() -> None:
    orders = {tuple(Plan(50, 50, 3, seed).rows_of(epoch)) for seed in (0, 1) for epoch in range(3)}
    assert len(orders) == 6


def test_random_numbers_of_a_batch_differ_by_position_and_by_seed() -> None:
    seeds = [Plan(100, 1, 10, seed).seed_of(position) for seed in (0, 1) for position in range(1000)]
    assert len(set(seeds)) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_plan_travels_without_its_permutations() -> None:
    plan = Plan(100_000, 100, 2, 7)
    before = plan.rows_of(3)
    travelled = pickle.dumps(plan)
    assert len(travelled) < 1000
    assert pickle.loads(travelled) == plan
    assert np.array_equal(pickle.loads(travelled).rows_of(3), before)


@pytest.mark.parametrize(
    ("field", "value"), [("rows", 0), ("batch_size", -1), ("epochs", 0), ("seed", -1), ("batch_size", 32.0), ("epochs", "3")]
)
def test_a_wrong_number_is_named_with_its_value(field: str, value: object) -> None:
    fields = {"rows": 10, "batch_size": 2, "epochs": 1, "seed": 0, field: value}
    with pytest.raises(UsageError, match=f"{field}={value!r}"):
        Plan(**fields)
