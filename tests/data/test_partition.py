"""Laws of shards: every row once an epoch, each worker on its own, as unlike as was asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paragrad as pg
from paragrad.data.leases import Leases
from paragrad.data.partition import partitioned
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays, Items
from paragrad.errors import UsageError


def plan_over(labels: list[int], shards: str, *, batch_size: int = 4, workers: int = 2, epochs: int = 2, seed: int = 0) -> Plan:
    y = torch.tensor(labels)
    source = Arrays((torch.zeros(len(y), 1), y))
    return partitioned(Plan(len(y), batch_size, epochs, seed), source, shards, workers)


def dealt(plan: Plan, workers: int, epoch: int = 0) -> list[list[int]]:
    """The rows that each worker is dealt in an epoch."""
    leases = Leases(batches=plan.batches, epochs=plan.epochs, workers=workers)
    found: list[list[int]] = []
    for worker in range(workers):
        taken = leases.take(worker, plan.positions)
        found.append([int(row) for p in taken if p // plan.batches == epoch for row in plan.rows_of(p)])
    return found


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=120),
    workers=st.integers(1, 5),
    batch_size=st.integers(1, 9),
    shards=st.sampled_from(["label", "dirichlet", "dirichlet:alpha=0.01", "dirichlet:alpha=100"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=120, deadline=None)
def test_every_row_is_dealt_once_an_epoch_and_always_to_the_same_worker(labels, workers, batch_size, shards, seed):
    if -(-len(labels) // batch_size) < workers:
        with pytest.raises(UsageError, match="fewer workers"):
            plan_over(labels, shards, batch_size=batch_size, workers=workers)
        return
    plan = plan_over(labels, shards, batch_size=batch_size, workers=workers, seed=seed)
    first, second = dealt(plan, workers, 0), dealt(plan, workers, 1)
    assert sorted(row for rows in first for row in rows) == list(range(len(labels)))
    assert [sorted(rows) for rows in first] == [sorted(rows) for rows in second]
    again = plan_over(labels, shards, batch_size=batch_size, workers=workers, seed=seed)
    assert all(np.array_equal(plan.order(epoch), again.order(epoch)) for epoch in (0, 1))


def test_shards_by_label_are_cut_from_the_sorted_labels():
    labels = np.random.default_rng(0).integers(0, 4, 400).tolist()
    shards = dealt(plan_over(labels, "label", workers=4, batch_size=10), 4)
    seen = [sorted(labels[row] for row in rows) for rows in shards]
    assert [label for rows in seen for label in rows] == sorted(labels)
    assert all(len(set(rows)) <= 2 for rows in seen)


def test_the_smaller_alpha_is_the_less_alike_are_the_shards():
    labels = np.random.default_rng(0).integers(0, 10, 4000).tolist()

    def largest_share(alpha: float) -> float:
        shards = dealt(plan_over(labels, f"dirichlet:alpha={alpha}", workers=8, batch_size=10), 8)
        return float(np.mean([max(np.bincount([labels[row] for row in rows])) / len(rows) for rows in shards]))

    spread = [largest_share(alpha) for alpha in (0.1, 30.0, 10_000.0)]
    assert spread == sorted(spread, reverse=True)
    assert spread[0] > 0.5
    assert spread[2] < 0.2


def test_rows_within_a_shard_are_in_another_order_in_each_epoch():
    plan = plan_over([0, 1] * 100, "label", workers=2)
    assert dealt(plan, 2, 0)[0] != dealt(plan, 2, 1)[0]


@pytest.mark.parametrize(
    ("partition", "says"),
    [
        ("labels", "Did you mean 'label'"),
        ("dirichlet:alpha=0", "alpha=0"),
        ("dirichlet:beta=1", "beta"),
        ("label:alpha=1", "alpha"),
        ("dirichlet:alpha=true", "above 0"),
    ],
)
def test_a_wrong_way_to_share_out_is_refused(partition, says):
    with pytest.raises(UsageError, match=says):
        pg.Run(partition=partition)


def test_shards_need_one_class_label_a_row():
    plan = Plan(8, 2, 1)
    for target in (torch.zeros(8), torch.zeros(8, 2, dtype=torch.int64)):
        with pytest.raises(UsageError, match="one class label"):
            partitioned(plan, Arrays((torch.zeros(8, 1), target)), "label", 2)
    with pytest.raises(UsageError, match="Items, not arrays in memory"):
        partitioned(plan, Items([(torch.zeros(1), 0)] * 8), "label", 2)


@pytest.mark.parametrize("shards", ["label", "dirichlet:alpha=0.3"])
def test_shards_work_on_every_engine_and_give_the_same_model(rows, model, shards, tmp_path):
    found = []
    for engine in (pg.Local(workers=2), pg.Vector(workers=2, mode="loop"), pg.Vector(workers=2, mode="together")):
        run = pg.Run(out=tmp_path / f"run{len(found)}", partition=shards)
        options = {"optimizer": "sgd:lr=0.1", "scheme": pg.SyncSGD(), "batch_size": 16, "epochs": 1}
        result = pg.train(model, rows, engine=engine, run=run, **options)
        assert result.summary["samples"] == len(rows[0])
        found.append([p.detach() for p in result.model.parameters()])
        if len(found) == 1:
            assert pg.replay(tmp_path / "run0", model, rows).equal
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found[0], found[2], strict=True))


def test_a_resumed_run_keeps_its_shards(rows, model, tmp_path):
    run = {"out": tmp_path / "run", "partition": "label"}
    options = {"optimizer": "sgd:lr=0.1", "scheme": pg.SyncSGD(), "batch_size": 16, "engine": pg.Vector(workers=2)}
    pg.train(model, rows, epochs=1, run=pg.Run(**run), **options)
    with pytest.raises(UsageError, match="partition 'label'"):
        pg.train(model, rows, epochs=2, run=pg.Run(**{**run, "partition": "dirichlet"}, resume=True), **options)
    assert pg.train(model, rows, epochs=2, run=pg.Run(**run, resume=True), **options).summary["samples"] == 800
