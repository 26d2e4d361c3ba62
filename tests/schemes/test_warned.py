"""Settings that are warned of fail on digits, and what the warning names holds (benchmarks/warned.py has more of them)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paragrad as pg
from paragrad.jobs import named
from paragrad.models import builtin
from paragrad.schemes.traits import name_of


def plan(workers: int, epochs: int, batch_size: int = 16) -> pg.SchemePlan:
    return pg.SchemePlan(workers, -(-1437 // batch_size) * epochs / workers, "adam")


def digits(scheme: str, workers: int, epochs: int, seed: int, model: str = "mlp", lr: float = 0.001) -> pg.Result:
    return pg.train(
        builtin.build(model, (64,), 10, seed),
        "digits",
        holdout=0.2,
        optimizer=f"adam:lr={lr}",
        scheme=scheme,
        engine=pg.Vector(workers=workers),
        epochs=epochs,
        batch_size=16,
        seed=seed,
        run=pg.Run(validate_every=None, checkpoint_every=None),
        verbose=0,
    )


def advised(scheme: pg.Scheme, of: pg.SchemePlan) -> str:
    """The setting that the only warning names."""
    (warning,) = scheme.warnings(of)
    given = {name: getattr(scheme, name) for name in ("window",)} | dict(
        re.findall(r"(\w+)=([\d.]*\d)", warning.split(". ", 1)[1])
    )
    return f"{name_of(scheme)}:" + ",".join(f"{key}={value}" for key, value in given.items())


@pytest.mark.parametrize("epochs", [5, 20])
def test_asyncdiloco_with_many_workers_and_few_windows(epochs):
    scheme, of = pg.AsyncDiLoCo(), plan(10, epochs)
    said = advised(scheme, of)
    assert named.scheme(said).warnings(of) == []
    with pytest.warns(pg.ParagradWarning, match="AsyncDiLoCo with 10 workers"):
        warned = digits("asyncdiloco", 10, epochs, 0)
    held = digits(said, 10, epochs, 0)
    assert warned.accuracy < 0.8
    assert held.accuracy > warned.accuracy + 0.1
    assert held.loss < warned.loss


@pytest.mark.parametrize(("workers", "epochs"), [(20, 20), (4, 5)])
def test_gem_with_adam_and_few_windows(workers, epochs):
    scheme, of = pg.GEM(window=10), plan(workers, epochs)
    said = advised(scheme, of)
    assert said == "gem:window=10,momentum=0"
    with pytest.warns(pg.ParagradWarning, match=f"GEM with {workers} workers"):
        warned = digits("gem:window=10", workers, epochs, 0)
    held = digits(said, workers, epochs, 0)
    assert warned.accuracy < held.accuracy - 0.05
    assert held.accuracy > 0.85


@pytest.mark.parametrize("of", [plan(20, 60), plan(4, 20), pg.SchemePlan(20, 90, "sgd"), pg.SchemePlan(20, 90, None)])
def test_gem_is_not_warned_of_where_it_holds(of):
    assert pg.GEM(window=5).warnings(of) == []
    assert pg.GEM(window=5, momentum=0.0).warnings(plan(20, 20)) == []


def test_diloco_of_a_few_rounds():
    scheme, of = pg.DiLoCo(window=90), plan(4, 8)
    said = advised(scheme, of)
    assert said == "diloco:window=90,outer_lr=0.7,outer_momentum=0.5"
    assert named.scheme(said).warnings(of) == []
    with pytest.warns(pg.ParagradWarning, match="DiLoCo of 2 rounds"):
        warned = digits("diloco:window=90", 4, 8, 0, "mlp:128-128-128", 0.003)
    assert warned.loss > 1.5 * digits(said, 4, 8, 0, "mlp:128-128-128", 0.003).loss


def test_diloco_is_not_warned_of_where_it_holds():
    assert pg.DiLoCo(window=30).warnings(plan(4, 20)) == []
    assert pg.DiLoCo(window=90, outer_lr=1.0, outer_momentum=0.0).warnings(plan(4, 8)) == []


@given(
    workers=st.integers(1, 24), steps=st.integers(4, 4000), window=st.integers(1, 200), rate=st.sampled_from([0.01, 0.07, 0.3])
)
def test_what_is_advised_for_asyncdiloco_is_never_warned_of(workers, steps, window, rate):
    scheme, of = pg.AsyncDiLoCo(window=window, outer_lr=rate), pg.SchemePlan(workers, steps)
    if scheme.warnings(of):
        assert named.scheme(advised(scheme, of)).warnings(of) == []
