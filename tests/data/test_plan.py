"""Laws of the plan: every row once an epoch, and the same rows wherever they are asked for."""

import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paragrad.data.plan import BlockPlan, Plan, SequentialPlan
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


# -- rows that are read in pieces, and rows that come once ----------------------------------------------------------


@st.composite
def block_plans(draw: st.DrawFn) -> BlockPlan:
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(sum))
    sizes = {"batch_size": draw(st.integers(1, 50)), "epochs": draw(st.integers(1, 3)), "seed": draw(st.integers(0, 99))}
    return BlockPlan.over(lengths, **sizes, buffer=draw(st.integers(1, 80)))


def piece_of(plan: BlockPlan, rows: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(plan.lengths), rows, side="right")


@given(block_plans(), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_blocks_hold_every_row_once_an_epoch_in_whatever_order_they_are_asked_for(plan: BlockPlan, random) -> None:
    positions = list(range(plan.positions))
    random.shuffle(positions)
    found = {position: plan.rows_of(position) for position in positions}
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    for epoch in range(plan.epochs):
        own = range(epoch * plan.batches, (epoch + 1) * plan.batches)
        assert sorted(np.concatenate([found[position] for position in own]).tolist()) == list(range(plan.rows))
        assert np.array_equal(np.concatenate([again.rows_of(position) for position in own]), plan.order(epoch))
    assert [len(found[position]) for position in range(plan.positions)] == [plan.size_of(p) for p in range(plan.positions)]


@given(block_plans())
@settings(max_examples=80, deadline=None)
def test_the_pieces_of_a_batch_are_known_and_come_in_the_order_of_reading(plan: BlockPlan) -> None:
    order = [plan.piece_at(place) for place in range(plan.places)]
    for epoch in range(plan.epochs):
        assert sorted(order[epoch * len(plan.lengths) : (epoch + 1) * len(plan.lengths)]) == list(range(len(plan.lengths)))
    before = (0, 0)
    for position in range(plan.positions):
        first, end = plan.pieces_of(position)
        assert set(piece_of(plan, plan.rows_of(position)).tolist()) <= set(order[first:end])
        assert before <= (first, end)
        assert sum(plan.lengths[piece] for piece in order[first:end]) <= 2 * plan.longest_block or plan.batch_size > plan.buffer
        before = (first, end)


def test_blocks_mix_the_rows_of_several_pieces_and_differ_by_epoch_and_seed() -> None:
    plan = BlockPlan.over([100] * 20, batch_size=50, epochs=2, buffer=500)
    batches = [piece_of(plan, plan.rows_of(position)) for position in range(plan.positions)]
    assert min(len(set(batch.tolist())) for batch in batches) >= 3
    orders = {
        tuple(BlockPlan.over([9] * 9, batch_size=81, epochs=3, seed=s, buffer=20).rows_of(e)) for s in (0, 1) for e in range(3)
    }
    assert len(orders) == 6


def test_a_plan_of_many_rows_makes_no_array_as_long_as_the_data() -> None:
    plan = BlockPlan.over([100_000] * 10_000, batch_size=128, epochs=2)
    tracemalloc.start()
    for position in (0, 1, plan.batches // 2, plan.batches - 1, plan.positions - 1):
        assert len(set(plan.rows_of(position).tolist())) == plan.size_of(position)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6  # the rows alone would be 8 GB


def test_a_sequential_plan_numbers_rows_on_over_the_epochs() -> None:
    plan = SequentialPlan(rows=10, batch_size=4, epochs=2)
    assert [plan.rows_of(position).tolist() for position in range(plan.positions)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
        [10, 11, 12, 13],
        [14, 15, 16, 17],
        [18, 19],
    ]
    assert pickle.loads(pickle.dumps(plan)) == plan
