"""Pictures of runs: made from the record alone, and refused with a reason."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import paragrad as pg
from paragrad import plot, record, toys
from paragrad.cli.main import app
from paragrad.errors import UsageError
from paragrad.types import Event

pytest.importorskip("matplotlib", reason="pip install 'paragrad[plot]'")


def write(directory: Path, model: str, events: list[dict[str, Any]]) -> Path:
    directory.mkdir()
    (directory / "run.toml").write_text(f'model = "{model}"\n')
    (directory / "record.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


def start(engine: str = "local:workers=2") -> dict[str, Any]:
    return {"event": "start", "time": 0.0, "scheme": "agn:window=5", "engine": engine, "workers": 2}


def commit(clock: int, **data: Any) -> dict[str, Any]:
    return {
        "event": "commit",
        "time": 0.1 * clock,
        "clock": clock,
        "worker": clock % 2,
        "loss": 1 / clock,
        "batches": [],
        **data,
    }


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    places = [(1 + 0.1 * k, -1 + 0.05 * k) for k in range(20)]
    commits = [
        commit(k, path=[list(places[k - 1]), [places[k][0] + 0.2, places[k][1]]], center=list(places[k])) for k in range(1, 20)
    ]
    return write(tmp_path / "toy", "beale:noise=0.1", [start(), *commits])


@pytest.fixture
def other(tmp_path: Path) -> Path:
    looks = [{"event": "validation", "time": k, "clock": k, "loss": 1 / k, "accuracy": 1 - 0.5 / k} for k in range(1, 5)]
    return write(tmp_path / "other", "mlp", [start(), *(commit(k) for k in range(1, 200)), *looks])


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize("run", ["toy", "other"])
def test_a_run_becomes_a_png(run: str, request: pytest.FixtureRequest) -> None:
    made = plot.plot(request.getfixturevalue(run))
    assert made.name == "plot.png"
    assert size(made) == (720, 528)
    assert made.stat().st_size > 10_000


def test_the_command_says_where_the_picture_is(toy: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ("plot", str(toy), "--out", str(tmp_path / "mine.png")), catch_exceptions=False)
    assert done.exit_code == 0
    assert "mine.png" in done.stdout
    assert size(tmp_path / "mine.png")


def test_a_path_is_that_of_the_record(toy: Path) -> None:
    events = [Event("commit", 0.0, {"clock": 1, "worker": 1, "path": [[1, 2], [3, 4]], "center": [5, 6]})]
    trace = plot.trace_of(events, toys.Beale())
    assert trace.centers == [toys.Beale().start, (5.0, 6.0)]
    assert trace.windows == [plot.Window(1, (1.0, 2.0), (3.0, 4.0))]


def test_a_gradients_line_leads_to_the_center_it_made() -> None:
    events = [Event("commit", 0.0, {"clock": 1, "worker": 0, "path": [[1, 2], [1, 2]], "center": [5, 6]})]
    assert plot.trace_of(events, toys.Beale()).windows == [plot.Window(0, (1.0, 2.0), (5.0, 6.0))]


def test_workers_that_write_into_the_center_walk_on_its_path() -> None:
    events = [Event("commit", 0.0, {"clock": k, "worker": 0, "center": [k, k]}) for k in (1, 2)]
    trace = plot.trace_of(events, toys.Beale())
    assert trace.on_center
    assert trace.windows[1] == plot.Window(0, (1.0, 1.0), (2.0, 2.0))


def test_a_run_of_such_workers_has_a_path_too(tmp_path: Path) -> None:
    run = pg.Run(out=str(tmp_path / "run"), checkpoint_every=None)
    engine = pg.Local(workers=2)
    pg.train(toys.Booth(), "noise:rows=40", optimizer="sgd:lr=0.02", scheme=pg.Hogwild(), engine=engine, batch_size=1, run=run)
    trace = plot.trace_of(list(record.read(tmp_path / "run" / "record.jsonl")), toys.Booth())
    assert trace.on_center
    assert len(trace.windows) == 40
    assert trace.centers[-1] != trace.centers[0]


def test_the_title_tells_scheme_workers_and_engine() -> None:
    assert plot.title([Event("start", 0.0, start("local:workers=2,threads=1"))]) == "agn:window=5, 2 workers (local, threads=1)"


def test_simulated_seconds_are_called_virtual(other: Path) -> None:
    for cluster, name in (({"cluster": "homogeneous"}, "virtual seconds"), ({}, "seconds")):
        events = [Event("start", 0.0, start("vector") | cluster), Event("validation", 1.0, {"loss": 1.0})]
        assert plot.curves(events, title="").axes[-1].get_xlabel() == name


def test_smoothing_keeps_a_constant_and_the_length() -> None:
    assert plot.smoothed(np.full(200, 3.0)).tolist() == pytest.approx([3.0] * 200)
    assert plot.smoothed(np.arange(3.0)).tolist() == [0, 1, 2]


def test_a_path_that_flies_away_does_not_shrink_the_rest_to_a_dot(tmp_path: Path) -> None:
    toy = toys.Beale()
    trace = plot.Trace(centers=[(1.0, -1.0), (1e9, -1e12), (float("inf"), 0.0)])
    low, high = plot.path(toy, trace, title="").axes[0].get_xlim()
    assert high - low < 10


def test_what_is_no_run_is_named(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no run in .*nowhere.* no record.jsonl"):
        plot.plot(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"mine.gif.*\.png"):
        plot.plot(toy, tmp_path / "mine.gif")
    with pytest.raises(UsageError, match=r"gone/mine.png' cannot be written"):
        plot.plot(toy, tmp_path / "gone" / "mine.png")
    with pytest.raises(UsageError, match="nothing to draw"):
        plot.plot(write(tmp_path / "empty", "mlp", [start()]))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'paragrad\[plot\]'"):
        plot.plot(toy)
