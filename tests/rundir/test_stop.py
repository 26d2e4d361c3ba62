"""A run ends before its last epoch when it is asked to, and says why."""

from __future__ import annotations

import pytest

import paragrad as pg
from tests.conftest import train

LONG = {"epochs": 4000, "holdout": 0.25, "scheme": pg.AGN(window=5), "engine": pg.Local(workers=2)}


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        (pg.Stop(accuracy=0.8), "target"),
        (pg.Stop(loss=0.4), "target"),
        (pg.Stop(seconds=0.7), "seconds"),
        (pg.Stop(patience=2), "patience"),
    ],
    ids=lambda value: str(value),
)
def test_the_first_condition_that_holds_ends_the_run(stop, reason, model, rows, tmp_path):
    rate = "sgd:lr=0.000000001" if reason == "patience" else "sgd:lr=0.1"
    result = train(model, rows, tmp_path / "run", run={"stop": stop, "validate_every": "0.1s"}, optimizer=rate, **LONG)
    assert result.stopped == result.summary["stopped"] == reason
    assert 0 < result.summary["samples"] < 300 * 4000
    if stop.accuracy is not None:
        assert max(look["accuracy"] for look in result.history) >= 0.8


def test_a_callback_that_returns_true_stops_cleanly_with_a_checkpoint(model, rows, tmp_path):
    seen = []

    def enough(event: pg.Event) -> bool:
        seen.append(event.kind)
        return event.kind == "commit" and seen.count("commit") == 20

    result = pg.train(model, rows, epochs=4000, run=pg.Run(out=tmp_path / "run", callbacks=(enough,)))
    assert result.stopped == "callback"
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert result.summary["commits"] < 60


def test_validation_looks_at_the_center_without_stopping_the_workers(model, rows, tmp_path):
    kinds = []

    def three_looks(event: pg.Event) -> bool:
        kinds.append(event.kind)
        return kinds.count("validation") == 3

    run = {"out": tmp_path / "run", "validate_every": "0.1s", "callbacks": (three_looks,)}
    result = pg.train(model, rows, batch_size=8, run=pg.Run(**run), **LONG)
    clocks = [look["clock"] for look in result.history]
    assert clocks == sorted(clocks)
    assert len(set(clocks)) == len(clocks) >= 4, "one at the start, two while it went on, one at the end"
    assert clocks[2] - clocks[0] > 3, "workers go on between looks"


def test_a_target_without_validation_rows_is_refused(model, rows, tmp_path):
    with pytest.raises(pg.UsageError, match="needs validation rows"):
        train(model, rows, tmp_path / "run", run={"stop": pg.Stop(accuracy=0.9)})
    with pytest.raises(pg.UsageError, match="keep='best' needs validation rows"):
        train(model, rows, tmp_path / "run", run={"keep": "best"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stop": lambda event: True}, "is not a pg.Stop.*when a callback returns True"),
        ({"stop": 600}, "stop=600 is not a pg.Stop"),
        ({"callbacks": print}, "a tuple of functions, even for one function"),
        ({"callbacks": ("print",)}, "a tuple of functions"),
        ({"validate_every": None, "keep": "best"}, "keep='best' needs validation during the run"),
        ({"validate_every": None, "stop": pg.Stop(patience=2)}, "A target or patience needs validation during the run"),
        ({"keep": "first"}, "keep='first' must be 'best' or 'last'"),
        ({"checkpoint_every": 0}, "checkpoint_every=0 must be a number of seconds above 0"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_anything_begins(fields, said):
    with pytest.raises(pg.UsageError, match=said):
        pg.Run(**fields)
