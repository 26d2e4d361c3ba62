"""DataLoaders: every row once an epoch, in the mini-batches that the loader itself would make of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import paragrad as pg
from paragrad.data import load
from paragrad.data.generated import Generated
from paragrad.data.source import Arrays, Items, leaves, plan_of


class Words(Dataset[Any]):
    """Sequences of different lengths."""

    def __init__(self, rows: int = 40) -> None:
        draw = np.random.default_rng(0)
        self.rows = [torch.from_numpy(draw.integers(1, 9, 1 + row % 7)) for row in range(rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self.rows[row], int(self.rows[row].sum() % 2)


class Numbers(Dataset[Any]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(row), 1.0]), row % 3


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter((torch.tensor([float(row)]), row % 2) for row in range(24))

    def __len__(self) -> int:
        return 24


def padded(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    words, labels = zip(*items, strict=True)
    return nn.utils.rnn.pad_sequence(list(words), batch_first=True), torch.tensor(labels)


@given(
    rows=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    own=st.booleans(),
    seed=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_every_row_comes_once_in_batches_that_the_loader_would_make(rows, batch_size, shuffle, drop_last, own, seed) -> None:
    dataset: Dataset[Any] = Words(rows) if own else Numbers(rows)
    loader = DataLoader(dataset, batch_size, shuffle=shuffle, drop_last=drop_last, collate_fn=padded if own else None)
    parts = load.split(loader)
    assert parts.batch_size == batch_size
    if drop_last and rows < batch_size:
        with pytest.raises(pg.UsageError, match="drop_last leaves out all"):
            plan_of(parts.train, batch_size=batch_size, epochs=2, seed=seed)
        return
    plan = plan_of(parts.train, batch_size=batch_size, epochs=2, seed=seed)
    assert plan.batches == len(loader)
    for epoch in range(2):
        positions = range(epoch * plan.batches, (epoch + 1) * plan.batches)
        order = np.concatenate([plan.rows_of(position) for position in positions])
        assert len(set(order.tolist())) == len(order) == (rows - rows % batch_size if drop_last else rows)
        if not shuffle:
            assert order.tolist() == list(range(len(order)))
        for position in positions:
            assert len(plan.rows_of(position)) == plan.size_of(position)
            mine = parts.train.batch(plan.rows_of(position))
            theirs = loader.collate_fn([dataset[int(row)] for row in plan.rows_of(position)])
            for one, other in zip(leaves(mine), leaves(theirs), strict=True):
                assert torch.equal(one, other)


def test_what_is_taken_of_a_loader_is_said_and_what_is_not() -> None:
    def note(loader: DataLoader[Any]) -> str:
        return next(text for text in load.split(loader).notes if text.startswith("DataLoader"))

    data = Numbers(24)
    assert note(DataLoader(data, 8)) == "DataLoader: batch size 8, not shuffled."
    assert note(DataLoader(data, 8, shuffle=True)) == "DataLoader: batch size 8, shuffled by the seed of the run."
    many = DataLoader(Words(24), 5, shuffle=True, drop_last=True, collate_fn=padded, num_workers=2)
    assert note(many) == (
        "DataLoader: batch size 5, shuffled by the seed of the run, a short last mini-batch dropped, its collate_fn. Its "
        "num_workers is not used: each worker reads its own rows."
    )
    odd = DataLoader(data, 8, sampler=SubsetRandomSampler(range(10)))
    assert note(odd) == (
        "DataLoader: one process reads it, in the order of its SubsetRandomSampler, and cuts it into mini-batches of its "
        "batch size, 8."
    )
    assert "in the order of its dataset" in note(DataLoader(Stream(), 4))


def test_a_sampler_of_ones_own_is_read_as_a_stream_and_a_plain_one_by_index() -> None:
    data = Numbers(12)
    for sampler in (WeightedRandomSampler([1.0] * 12, 12), SubsetRandomSampler(range(6)), RandomSampler(data, num_samples=5)):
        assert isinstance(load.split(DataLoader(data, 4, sampler=sampler)).train, Generated)
    for sampler in (RandomSampler(data), SequentialSampler(data)):
        assert isinstance(load.split(DataLoader(data, 4, sampler=sampler)).train, Items)
    tensors = TensorDataset(torch.zeros(12, 2), torch.arange(12) % 2)
    assert isinstance(load.split(DataLoader(tensors, 4)).train, Arrays)
    own = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False))
    assert isinstance(load.split(own).train, Items)
    assert load.split(own).batch_size == 4


def bag() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(9, 4, padding_idx=0), nn.Linear(4, 2))


@pytest.mark.parametrize("engine", [pg.Local(workers=2), pg.Vector(workers=2)], ids=["local", "vector"])
def test_batches_padded_to_their_longest_row_are_trained_validated_and_predicted(engine, tmp_path) -> None:
    words = Words(40)
    lengths = {len(word) for word in words.rows}
    assert len(lengths) > 1
    run = pg.Run(out=tmp_path / "run")
    items = pg.Items(words, collate=padded)
    assert load.split(items).notes[0].startswith("Inputs as collate makes them; label (0 ")
    result = pg.train(bag(), items, holdout=0.25, scheme=pg.SyncSGD(), engine=engine, batch_size=4, epochs=2, run=run)
    loader = DataLoader(words, 4, shuffle=True, collate_fn=padded)
    same = pg.train(bag(), loader, holdout=0.25, scheme=pg.SyncSGD(), engine=engine, epochs=2, run=pg.Run(out=tmp_path / "l"))
    for one, other in zip(result.model.state_dict().values(), same.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert same.summary["batch_size"] == 4
    assert pg.load(tmp_path / "run", model=bag()).predict(items).shape == (40, 2)


def test_the_same_rows_give_the_same_training_from_arrays_and_loaders(tmp_path) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((60, 3)).astype(np.float32), draw.integers(0, 2, 60)
    tensors = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, row: int) -> Any:
            return x[row], y[row]

    doors = {
        "arrays": (x, y),
        "dataset": Rows(),
        "items": pg.Items(Rows()),
        "loader": DataLoader(tensors, 10, shuffle=True),
        "loader of rows": DataLoader(Rows(), 10, shuffle=True),
    }
    found = {}
    for name, door in doors.items():
        torch.manual_seed(0)
        own = None if "loader" in name else 10
        made = pg.train(
            nn.Linear(3, 2),
            door,
            scheme=pg.SyncSGD(),
            engine=pg.Vector(workers=2),
            batch_size=own,
            run=pg.Run(out=tmp_path / name.replace(" ", "-")),
        )
        found[name] = made.model.weight.detach()
        assert made.summary["batch_size"] == 10
    for name, weight in found.items():
        assert torch.equal(weight, found["arrays"]), name


def test_a_batch_size_that_is_given_goes_over_that_of_the_loader_and_is_said(tmp_path) -> None:
    loader = DataLoader(Numbers(24), 8)
    run = pg.Run(out=tmp_path / "run")
    result = pg.train(nn.Linear(2, 3), loader, batch_size=6, engine=pg.Vector(workers=2), run=run)
    assert result.summary["batch_size"] == 6
    assert "Mini-batches have 6 rows (batch_size), not the 8 of the DataLoader." in (
        (tmp_path / "run" / "record.jsonl").read_text()
    )


def test_a_stream_of_uneven_batches_is_refused_with_the_remedy() -> None:
    data = Words(21)
    loader = DataLoader(data, 3, sampler=SubsetRandomSampler(range(21)), collate_fn=padded)
    source = load.split(loader).train
    plan = plan_of(source, batch_size=3, epochs=1, seed=0)
    with pytest.raises(pg.UsageError, match=r"pg.Items\(dataset, collate=...\)"):
        list(source.chunks(plan))
