"""A source of the user's own: the same rows on every engine, and its warnings in the record of each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import paragrad as pg
from paragrad.rundir.record import read
from tests.conftest import every_batch_once, train


class Mine:
    """Rows made when they are asked for; one of them is warned of."""

    def __init__(self, rows: int = 60) -> None:
        self.report: Callable[[str], None] = lambda message: None
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def batch(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if 59 in rows:
            self.report("the detector was off")
        x = torch.from_numpy(np.stack([np.sin(rows * k) for k in range(1, 9)], axis=1)).float()
        return x, (x[:, 0] > 0).long()


ENGINES = [pg.Local(workers=2), pg.Vector(workers=2), pg.Network(workers=2, here=2, threads=1)]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
def test_rows_of_ones_own_are_trained_on_and_their_warnings_recorded(engine, model, tmp_path):
    with pytest.warns(pg.ParagradWarning, match="the detector was off"):
        result = train(model, Mine(), tmp_path, engine=engine, scheme=pg.SyncSGD(), epochs=2, batch_size=6)
    assert every_batch_once(tmp_path, 2 * 10)
    warnings = [event.data["message"] for event in read(tmp_path) if event.kind == "warning"]
    assert any("the detector was off" in message for message in warnings)
    x, y = Mine().batch(np.arange(60))
    same = train(model, (x, y), tmp_path / "arrays", engine=pg.Local(workers=2), scheme=pg.SyncSGD(), epochs=2, batch_size=6)
    for mine, other in zip(result.model.parameters(), same.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_part_is_held_out(model, tmp_path):
    result = train(model, Mine(), tmp_path, engine=pg.Vector(workers=2), holdout=0.25, batch_size=5, verbose=0)
    assert result.summary["samples"] == 4 * 45
    assert 0 <= result.accuracy <= 1


class Nothing(Mine):
    def batch(self, rows):
        return rows.tolist(), rows.tolist()


class Ragged(Mine):
    def batch(self, rows):
        return torch.zeros(3, 8), torch.zeros(3)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Mine(0), "data has no rows"),
        (Nothing(), r"Nothing\.batch returned a int for one row of data: it must return tensors"),
        (Ragged(), r"Ragged\.batch returned a Tensor for one row of data"),
    ],
)
def test_a_source_that_gives_something_else_is_refused_before_the_run(source, said, model, tmp_path):
    with pytest.raises(pg.UsageError, match=said):
        train(model, source, tmp_path)
    assert not list(tmp_path.iterdir())
