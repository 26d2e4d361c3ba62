"""A loss that explodes is said once, as soon as it is seen, with what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paragrad as pg
from paragrad.rundir.explosion import Explosion
from tests.conftest import Watch, train


def watched() -> tuple[Explosion, list[dict[str, Any]]]:
    said: list[dict[str, Any]] = []
    return Explosion(lambda **data: said.append(data)), said


@given(losses=st.lists(st.floats(0.1, 0.9), min_size=1, max_size=30), start=st.floats(0.1, 0.9))
def test_losses_of_one_size_are_no_explosion(losses, start):
    explosion, said = watched()
    explosion.validated(start, 0)
    for clock, loss in enumerate(losses, 1):
        explosion.committed(loss, clock, 0.1)
        explosion.validated(loss, clock)
    assert not said


@given(
    before=st.lists(st.floats(0.5, 2.0), max_size=10),
    loss=st.one_of(st.floats(20.1, 1e30), st.just(math.nan), st.just(math.inf)),
)
def test_a_validation_far_above_the_start_is_said_at_once_and_once(before, loss):
    explosion, said = watched()
    explosion.validated(2.0, 0)
    for clock, usual in enumerate(before, 1):
        explosion.validated(usual, clock)
    for clock in (50, 60):
        explosion.validated(loss, clock)
    assert [data["clock"] for data in said] == [50]
    assert said[0]["loss"] == (loss if math.isfinite(loss) else None)
    for part in ("at update 50", "validation loss", "Lower the learning rate", "scale the inputs"):
        assert part in said[0]["message"]


def test_without_validation_three_commits_in_a_row_are_needed_and_one_that_is_not_finite():
    explosion, said = watched()
    for clock, loss in enumerate([1.0, 50.0, 50.0, 1.0, 20.0, 30.0, 40.0, 50.0], 1):
        explosion.committed(loss, clock, 0.25)
    assert [(data["clock"], data["loss"]) for data in said] == [(7, 40.0)]
    assert "more than 10 times the 1 of the start" in said[0]["message"]
    assert "(now 0.25)" in said[0]["message"]
    explosion, said = watched()
    explosion.committed(math.nan, 1, 0.25)
    assert "the training loss is not finite" in said[0]["message"]


def test_losses_below_zero_are_not_compared():
    explosion, said = watched()
    explosion.validated(-3.0, 0)
    explosion.validated(-1.0, 1)
    explosion.validated(5.0, 2)
    assert not said


@pytest.mark.parametrize("engine", [pg.Local(workers=2), pg.Vector(workers=2)], ids=["local", "vector"])
@pytest.mark.parametrize("held", [{"holdout": 0.25}, {}], ids=["validated", "not"])
def test_a_run_that_explodes_says_so_before_it_ends(engine, held, tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 8, generator=generator)
    data = (x, x.sum(1, keepdim=True))
    watch = Watch()
    model = torch.nn.Linear(8, 1)
    train(model, data, tmp_path / "run", watch, engine=engine, scheme=pg.SyncSGD(), optimizer="sgd:lr=1.5", epochs=1, **held)
    kinds = [event.kind for event in watch.events]
    (warning,) = [event for event in watch.events if event.kind == "warning"]
    assert "Lower the learning rate (now 1.5)" in warning.data["message"]
    assert warning.data["clock"] > 0
    assert "commit" in kinds[kinds.index("warning") :], "while it goes on, not at the end"
