"""Mini-batches of any collate function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.errors import UsageError


class Sentences(torch.utils.data.Dataset):
    """Rows of different lengths, whose first word says the class."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.full((2 + row * 7 % 5,), 1 + row % 2), row % 2


def padded(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True), torch.tensor([row[1] for row in rows])


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.words(x).mean(1))


@pytest.mark.parametrize("engine", [pg.Local(workers=2), pg.Vector(workers=2)], ids=["local", "vector"])
def test_rows_that_are_padded_to_the_longest_of_a_mini_batch(engine: Any) -> None:
    rows = pg.Items(Sentences(), collate=padded)
    result = pg.train(Mean(), rows, validation=rows, engine=engine, optimizer="adam:lr=0.05", batch_size=2, epochs=4)
    assert result.accuracy == 1.0
    trained = pg.load(result.directory, Mean())
    assert trained.evaluate(rows)["accuracy"] == 1.0
    few = pg.Items(Sentences(), rows=np.array([0, 5]), collate=padded)  # both of another length than the first mini-batch
    assert trained.predict(few).shape == (2, 2)


def test_replicas_of_one_tensor_need_one_shape() -> None:
    with pytest.raises(UsageError, match="may give mini-batches of different shapes"):
        pg.train(Mean(), pg.Items(Sentences(), collate=padded), engine=pg.Vector(workers=2, mode="together"), batch_size=2)
