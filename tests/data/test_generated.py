"""Laws of generated rows: each once, in the order in which they come, kept until they are retired."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paragrad as pg
from paragrad.data import load
from paragrad.data.generated import Generated, first_row
from paragrad.data.source import Arrays, Weighted, batch_at, plan_of
from paragrad.errors import UsageError


def counting(sizes, total=None):
    """A generator of batches whose rows are numbered on."""

    def make():
        first, step = 0, 0
        while total is None or first < total:
            rows = np.arange(first, first + sizes[step % len(sizes)])
            yield rows[:, None].astype(np.float64), rows
            first, step = first + len(rows), step + 1

    return make


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 12), st.integers(1, 30), st.integers(1, 3), st.data()
)
@settings(max_examples=60, deadline=None)
def test_rows_are_cut_anew_and_come_once_each_in_order(sizes, batch_size, rows, epochs, data):
    source = Generated(counting(sizes), rows=rows)
    plan = plan_of(source, batch_size=batch_size, epochs=epochs, seed=0)
    open_, floor = list(range(plan.positions)), 0
    source.follow(lambda: floor)
    seen = []
    while open_:  # any of the next few positions may be asked for, as by workers that hold leases
        position = open_.pop(data.draw(st.integers(0, min(3, len(open_) - 1))))
        floor = min([position, *open_])
        x, y = batch_at(source, plan, position)
        assert x.dtype == torch.float32
        first = first_row(plan, position)
        assert y.tolist() == x[:, 0].int().tolist() == list(range(first, first + plan.size_of(position)))
        seen += y.tolist()
        assert batch_at(source, plan, position)[1].tolist() == y.tolist()  # it can be asked for again
        # No more is kept than from the lowest position that is not retired to the highest that was asked for.
        assert sum(len(tree[1]) for _, tree in source._kept) <= max(seen) + 1 - first_row(plan, floor) + 2 * max(sizes)
    assert sorted(seen) == list(range(rows * epochs))


def test_rows_are_passed_over_where_a_run_is_resumed():
    source = Generated(counting([4]), rows=100)
    plan = plan_of(source, batch_size=5, epochs=1, seed=0)
    source.follow(lambda: 15)
    assert batch_at(source, plan, 15)[1].tolist() == [75, 76, 77, 78, 79]
    assert sum(len(tree[1]) for _, tree in source._kept) <= 8


@pytest.mark.parametrize(
    ("ends", "says"), [(8, "epoch 1, after 2 of 3 steps (8 of 12 rows)"), (20, "epoch 2, after 2 of 3 steps")]
)
def test_a_generator_that_ends_early_says_after_how_many_of_how_many_steps(ends, says):
    source = Generated(counting([4], total=ends), steps=3)
    plan = plan_of(source, batch_size=4, epochs=2, seed=0)
    for position in range(ends // 4):
        assert len(batch_at(source, plan, position)[1]) == 4
    with pytest.raises(UsageError, match=re.escape(says)):
        batch_at(source, plan, ends // 4)


def test_what_ends_with_the_epoch_is_begun_again_and_what_cannot_be_says_so():
    source = Generated(counting([4], total=12), steps=3)
    plan = plan_of(source, batch_size=12, epochs=2, seed=0)
    assert [batch_at(source, plan, epoch)[1].tolist() for epoch in (0, 1)] == [list(range(12))] * 2
    begun = Generated(counting([4], total=12)(), steps=3)
    assert batch_at(begun, plan, 0)[1].tolist() == list(range(12))
    with pytest.raises(UsageError, match="ended after 1 epochs and cannot be restarted"):
        batch_at(begun, plan, 1)


def test_a_loader_tells_how_many_rows_it_has_and_is_shuffled_anew_in_each_epoch():
    data = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10))
    source = Generated(DataLoader(data, batch_size=4, shuffle=True))
    assert len(source) == 10
    plan = plan_of(source, batch_size=10, epochs=2, seed=1)
    torch.manual_seed(7)
    before = torch.rand(1)
    torch.manual_seed(7)
    epochs = [batch_at(source, plan, epoch)[1].tolist() for epoch in (0, 1)]
    assert torch.equal(torch.rand(1), before)  # its random numbers are its own
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]
    again = Generated(DataLoader(data, batch_size=4, shuffle=True))
    assert [batch_at(again, plan, epoch)[1].tolist() for epoch in (0, 1)] == epochs
    assert len(Generated(DataLoader(data, batch_size=4, drop_last=True))) == 8


class Numbers(IterableDataset):
    def __iter__(self):
        return iter([(torch.tensor([float(k)]), k) for k in range(7)])


def test_an_iterable_dataset_is_read_in_its_order():
    with pytest.raises(UsageError, match=r"rows=\.\.\."):
        load.split(Numbers())
    plan = plan_of(source := Generated(Numbers(), rows=7), batch_size=7, epochs=2, seed=0)
    assert batch_at(source, plan, 1)[1].tolist() == list(range(7))


def test_a_generator_that_does_not_say_its_rows_is_asked_for_them():
    for given_ in (counting([3]), counting([3])()):
        with pytest.raises(UsageError, match=r"pg\.Generated\(make, rows=\.\.\.\)"):
            load.split(given_)
    with pytest.raises(UsageError, match="steps"):
        Generated(counting([3]))
    with pytest.raises(UsageError, match="both given"):
        Generated(counting([3]), rows=3, steps=1)
    with pytest.raises(UsageError, match="steps=0"):
        Generated(counting([3]), steps=0)
    with pytest.raises(UsageError, match="given a int"):
        Generated(3, rows=3)
    with pytest.raises(UsageError, match="no batch at all"):
        Generated(counting([3], total=0), rows=3)


def test_batches_of_another_form_are_refused():
    def changing():
        yield torch.zeros(2, 3), torch.zeros(2)
        yield torch.zeros(2, 4), torch.zeros(2)

    source = Generated(changing, rows=4)
    with pytest.raises(UsageError, match="Batch 1 of generator changing"):
        batch_at(source, plan_of(source, batch_size=4, epochs=1, seed=0), 0)

    def spoilt():
        yield torch.full((2, 3), torch.nan), torch.zeros(2)

    with pytest.raises(UsageError, match="NaN"):
        Generated(spoilt, rows=4)


def test_rows_to_validate_on_are_kept_and_none_can_be_held_out():
    source = Generated(counting([4]), rows=12)
    parts = load.split(source, validation=Generated(counting([4]), rows=6))
    assert isinstance(parts.validation, Arrays)
    assert parts.validation.batch(np.arange(6))[1].tolist() == list(range(6))
    with pytest.raises(UsageError, match="validation="):
        load.split(source, holdout=0.2)


def test_a_generator_that_has_begun_is_for_one_process(model):
    source = pg.Generated(((torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)) for _ in range(3)), rows=12)
    with pytest.raises(UsageError, match="give a function that makes it"):
        pg.train(model, source, batch_size=4, engine=pg.Local(workers=2))
    assert pg.train(model, source, batch_size=4, engine=pg.Vector(workers=2)).summary["samples"] == 12


def test_weights_come_as_the_last_of_a_batch():
    def make():
        for k in range(3):
            rows = np.arange(4 * k, 4 * k + 4)
            yield rows[:, None].astype(np.float32), rows % 2, rows / 10

    source = Generated(make, rows=12, weighted=True)
    found = batch_at(source, plan_of(source, batch_size=5, epochs=1, seed=0), 1)
    assert isinstance(found, Weighted)
    assert found.rows[0][:, 0].tolist() == [5, 6, 7, 8, 9]
    assert torch.allclose(found.weight, torch.arange(5, 10) / 10)
    with pytest.raises(UsageError, match=r"not \(x, y, weight\)"):
        Generated(lambda: iter([torch.zeros(4)]), rows=4, weighted=True)
    with pytest.raises(UsageError, match="one number for each row"):
        Generated(lambda: iter([(torch.zeros(4), torch.zeros(4), torch.zeros(3))]), rows=4, weighted=True)
