"""Schemes that are equations of plain SGD refuse another optimiser, instead of quietly doing something else."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import paragrad as pg
from tests.conftest import train

SCHEMES = [pg.EAMSGD(window=2), pg.DeanDownpour(), pg.OrMo()]
OTHERS = ["adam", "sgd:lr=0.1,momentum=0.9", "sgd:lr=0.1,weight_decay=0.01", partial(torch.optim.RMSprop, lr=0.1)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@pytest.mark.parametrize("optimizer", OTHERS, ids=str)
def test_another_optimiser_is_refused_before_a_run_directory_is_made(scheme, optimizer, model, rows, tmp_path):
    with pytest.raises(pg.UsageError, match="is defined for plain SGD"):
        train(model, rows, tmp_path / "run", scheme=scheme, optimizer=optimizer)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_plain_sgd_is_taken(scheme, model, rows, tmp_path):
    result = train(model, rows, tmp_path / "run", scheme=scheme, optimizer="sgd:lr=0.05")
    assert result.stopped == "finished"
