"""What validation sees does not depend on load, kills or the engine; the best weights are those of the lowest loss."""

from __future__ import annotations

import os
import signal
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paragrad as pg
from paragrad.rundir import snapshots
from paragrad.rundir.best import lowest
from paragrad.rundir.grid import Snapshot
from paragrad.rundir.record import read
from paragrad.rundir.snapshots import Snapshots
from tests.conftest import Watch, stop_after, train

NOISY = {"holdout": 0.25, "scheme": pg.SyncSGD(), "optimizer": "sgd:lr=3.0", "epochs": 8}
"""A learning rate at which the validation loss goes up and down."""
EPOCH = 13
"""Updates in one: 38 mini-batches of 8 for 3 workers."""


class Killed(BaseException):
    """Stands for a power cut: nothing is written after it."""


def killed_at(commit: int) -> Watch:
    def cut(watch: Watch, event: pg.Event) -> None:
        raise Killed

    return Watch(at=commit, act=cut)


def curve(result: pg.Result) -> list[tuple[float, ...]]:
    return [tuple(look[name] for name in ("clock", "samples", "epoch", "loss", "accuracy")) for look in result.history]


@pytest.mark.parametrize("engine", [pg.Local(workers=3), pg.Vector(workers=3)], ids=["local", "vector"])
def test_there_is_a_point_at_the_start_and_at_the_end_of_each_epoch(engine, model, rows, tmp_path):
    result = train(model, rows, tmp_path / "run", engine=engine, **NOISY)
    assert [look["clock"] for look in result.history] == [EPOCH * k for k in range(9)]
    assert [look["epoch"] for look in result.history] == list(range(9))
    assert [look["samples"] for look in result.history] == [300 * k for k in range(9)]
    assert list(result.history[0])[:5] == ["seconds", "epoch", "clock", "samples", "loss"]
    assert result.history[0]["seconds"] < result.history[-1]["seconds"] <= round(result.seconds, 4) + 1e-4
    assert result.summary["kept"] == {"weights": "last", "epoch": 8.0, "clock": EPOCH * 8}


def test_two_runs_have_the_same_curve_to_the_bit(model, rows, tmp_path):
    one, two = (train(model, rows, tmp_path / name, **NOISY) for name in ("one", "two"))
    assert curve(one) == curve(two)


@pytest.mark.parametrize("at", [5, 3 * EPOCH * 3, 3 * EPOCH * 5 + 1])
def test_a_killed_and_resumed_run_has_the_curve_and_the_best_weights_of_an_unbroken_one(at, model, rows, tmp_path):
    whole = train(model, rows, tmp_path / "whole", run={"keep": "best"}, **NOISY)
    with pytest.raises(Killed):
        train(model, rows, tmp_path / "run", killed_at(at), run={"keep": "best", "checkpoint_every": 0.02}, **NOISY)
    resumed = train(model, rows, tmp_path / "run", run={"keep": "best", "resume": "auto"}, **NOISY)
    assert curve(resumed) == curve(whole)
    assert resumed.summary["kept"] == whole.summary["kept"]
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("engine", [pg.Local(workers=3), pg.Vector(workers=3)], ids=["local", "vector"])
@pytest.mark.parametrize("at", [EPOCH * 2 + 5, EPOCH * 3 - 1])
def test_where_a_run_was_stopped_is_no_point_of_the_curve_once_it_goes_on(engine, at, model, rows, tmp_path):
    options: dict[str, Any] = NOISY | {"engine": engine, "scheme": pg.AGN(window=2), "optimizer": "sgd:lr=0.1"}
    stopped = train(model, rows, tmp_path / "run", stop_after(at), run={"keep": "best"}, **options)
    assert stopped.history[-1]["clock"] == stopped.summary["commits"]
    resumed = train(model, rows, tmp_path / "run", run={"keep": "best", "resume": True}, **options)
    assert [int(look["epoch"]) for look in resumed.history] == list(range(9))
    best = lowest(resumed.history)
    assert best is not None
    assert resumed.summary["kept"]["clock"] == best["clock"]
    assert resumed.loss == pytest.approx(best["loss"], rel=1e-5)


@pytest.mark.parametrize("engine", [pg.Local(workers=3), pg.Vector(workers=3)], ids=["local", "vector"])
def test_the_best_weights_are_the_model_the_file_and_the_summary(engine, model, rows, tmp_path):
    result = train(model, rows, tmp_path / "run", engine=engine, run={"keep": "best"}, **NOISY)
    best, last = lowest(result.history), result.history[-1]
    assert best is not None
    assert best["loss"] < last["loss"], "else nothing is tested"
    assert result.summary["kept"] == {"weights": "best", "epoch": best["epoch"], "clock": best["clock"]}
    assert result.loss == pytest.approx(best["loss"], rel=1e-5)
    assert result.accuracy == pytest.approx(best["accuracy"], rel=1e-5)
    torch.testing.assert_close(pg.load(result.directory, model=model).module.state_dict(), result.model.state_dict())
    assert [path.name for path in (result.directory / "best").iterdir()] == [f"{best['clock']:010d}"]
    replayed = pg.replay(result.directory, model, rows, holdout=0.25)
    assert replayed.within
    assert ("model.safetensors", best["clock"]) in [(pair.what, pair.clock) for pair in replayed.compared]


@pytest.mark.parametrize("engine", [pg.Local(workers=3), pg.Vector(workers=3)], ids=["local", "vector"])
def test_patience_stops_at_the_same_point_each_time_and_keeps_the_best(engine, model, rows, tmp_path):
    options: dict[str, Any] = NOISY | {"engine": engine, "epochs": 400}
    one, two = (train(model, rows, tmp_path / n, run={"stop": pg.Stop(patience=2)}, **options) for n in ("one", "two"))
    assert one.stopped == "patience"
    assert curve(one) == curve(two)
    best = lowest(one.history)
    assert best is not None
    assert one.summary["kept"] == two.summary["kept"] == {"weights": "best", "epoch": best["epoch"], "clock": best["clock"]}
    assert one.history[-1]["clock"] == best["clock"] + 2 * EPOCH
    last = train(model, rows, tmp_path / "last", run={"stop": pg.Stop(patience=2), "keep": "last"}, **options)
    assert last.summary["kept"]["weights"] == "last"
    assert curve(last)[: len(one.history)] == curve(one)


def test_patience_counts_on_in_a_resumed_run(model, rows, tmp_path):
    options: dict[str, Any] = NOISY | {"engine": pg.Vector(workers=3), "epochs": 400, "optimizer": "sgd:lr=1e-9"}
    stop = {"stop": pg.Stop(patience=6)}
    whole = train(model, rows, tmp_path / "whole", run=stop, **options)
    assert whole.stopped == "patience"
    train(model, rows, tmp_path / "run", stop_after(3 * EPOCH * 4), run=stop, **options)
    resumed = train(model, rows, tmp_path / "run", run=stop | {"resume": True}, **options)
    assert resumed.stopped == "patience"
    assert [look["clock"] for look in resumed.history] == [look["clock"] for look in whole.history]


def test_a_killed_validator_is_replaced_and_the_same_points_are_validated(model, rows, tmp_path):
    whole = train(model, rows, tmp_path / "whole", **NOISY)
    killed: list[int] = []

    def kill(event: pg.Event) -> None:
        if event.kind == "commit" and not killed:
            for child in (int(pid) for pid in os.listdir("/proc") if pid.isdigit()):
                try:
                    name = Path(f"/proc/{child}/cmdline").read_bytes()
                    log = os.readlink(f"/proc/{child}/fd/1")
                except OSError:
                    continue
                if name and log == str(tmp_path / "run" / "logs" / "evaluator.log"):
                    os.kill(child, signal.SIGKILL)
                    killed.append(child)

    result = train(model, rows, tmp_path / "run", kill, **NOISY)
    assert killed
    assert curve(result) == curve(whole)


def test_a_finished_run_that_goes_on_has_the_points_of_a_longer_one(model, rows, tmp_path):
    whole = train(model, rows, tmp_path / "whole", run={"keep": "best"}, **NOISY)
    train(model, rows, tmp_path / "run", run={"keep": "best"}, **NOISY | {"epochs": 5})
    longer = train(model, rows, tmp_path / "run", run={"keep": "best", "resume": True}, **NOISY)
    assert [look["clock"] for look in longer.history] == [look["clock"] for look in whole.history]
    best = lowest(longer.history)
    assert best is not None
    assert longer.summary["kept"]["clock"] == best["clock"]


def test_lost_best_weights_are_said_aloud(model, rows, tmp_path):
    train(model, rows, tmp_path / "run", run={"keep": "last"}, **NOISY | {"epochs": 2})
    watch = Watch()
    train(model, rows, tmp_path / "run", watch, run={"keep": "best", "resume": True}, **NOISY | {"epochs": 4})
    said = [event.data["message"] for event in watch.events if event.kind == "warning"]
    assert any("cannot be read" in message and "Only the best from now on are kept" in message for message in said)


def test_hogwild_is_validated_too(model, rows, tmp_path):
    result = train(model, rows, tmp_path / "run", scheme=pg.Hogwild(), holdout=0.25, epochs=3, run={"keep": "best"})
    assert [round(look["epoch"]) for look in result.history] == [0, 1, 2, 3]
    assert result.summary["kept"]["weights"] == "best"


def test_points_of_a_record_are_those_of_the_history(model, rows, tmp_path):
    result = train(model, rows, tmp_path / "run", scheme=pg.AGN(window=2), holdout=0.25)
    looks = [dict(event.data) for event in read(tmp_path / "run") if event.kind == "validation"]
    assert looks == result.history
    epochs = [event.data["epoch"] for event in read(tmp_path / "run") if event.kind == "commit"]
    assert epochs == sorted(epochs)
    assert epochs[-1] == 4.0


# -- a queue that is full -----------------------------------------------------------------------------------------------


class _Session:
    """As much of a session as snapshots ask for."""

    def __init__(self, out: Path, **run: Any) -> None:
        self.run, self.directory, self.stopped = pg.Run(**run), out, None
        self.checkpoints = SimpleNamespace(writing=-1)
        self.plan, self.tally = SimpleNamespace(rows=10), SimpleNamespace(samples=0, validations=[])
        self.clock, self.seconds = 0, 0.0
        self.explosion = SimpleNamespace(validated=lambda loss, clock: None)
        self.said: list[tuple[str, dict[str, Any]]] = []
        empty = torch.zeros(0)
        self.center = SimpleNamespace(model=lambda: {"value": torch.ones(2), "buffers": empty, "integers": empty})

    def epoch_at(self, samples: int) -> float:
        return samples / 10

    def emit(self, kind: str, **data: Any) -> None:
        self.said.append((kind, data))
        if kind == "validation":
            self.tally.validations.append(data)

    def stop(self, reason: str) -> None:
        self.stopped = self.stopped or reason

    def epochs(self, looks: Snapshots, count: int) -> None:
        for _ in range(count):
            self.clock += 1
            self.center.clock = self.clock
            self.tally.samples += 10
            looks.updated(last=False)


def begun(tmp_path: Path, **run: Any) -> tuple[_Session, Snapshots]:
    session = _Session(tmp_path, **run)
    session.center.clock = 0
    looks = Snapshots(session, held_out=1)  # type: ignore[arg-type]
    looks.begin()
    return session, looks


def test_a_full_queue_leaves_points_out_and_says_so_once(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "QUEUED", 4)
    session, looks = begun(tmp_path)
    session.epochs(looks, 9)
    assert [one.clock for one in looks.waiting] == [0, 1, 2, 3]
    (kind, data), *more = session.said
    assert kind == "note"
    assert "Validation is slower" in data["message"]
    assert not more
    looks.validated({"loss": 1.0})
    session.epochs(looks, 1)
    assert [one.clock for one in looks.waiting] == [1, 2, 3, 10]


def test_large_snapshots_wait_by_twos(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "QUEUED_BYTES", 1)
    session, looks = begun(tmp_path)
    session.epochs(looks, 9)
    assert [one.clock for one in looks.waiting] == [0, 1]


def test_where_patience_decides_the_center_waits_for_validation_instead(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "QUEUED", 4)
    session, looks = begun(tmp_path, stop=pg.Stop(patience=3))
    losses = deque([3.0, 2.0, 2.5, 2.4, 2.3, 1.0])
    looks.make_room = lambda: looks.validated({"loss": losses.popleft()})
    session.epochs(looks, 9)
    assert session.stopped == "patience"
    assert [look["clock"] for look in session.tally.validations] == [0, 1, 2, 3, 4]
    assert not looks.waiting, "what came later is not looked at"
    assert looks.best.snapshot is not None
    assert looks.best.snapshot.clock == 1
    looks.finish()


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path):
    session, looks = begun(tmp_path, keep="best")
    session.epochs(looks, 1)
    looks.validated({"loss": float("nan")})
    looks.validated({"loss": 7.0})
    assert looks.best.snapshot is not None
    assert looks.best.snapshot.clock == 1
    looks.finish()


def test_facts_are_all_but_the_tensors():
    snapshot = Snapshot(clock=3, samples=30, epoch=3.0, seconds=1.5, tensors={"value": torch.zeros(4)})
    assert snapshot.facts == {"clock": 3, "samples": 30, "epoch": 3.0, "seconds": 1.5}
    assert snapshot.bytes == 16
