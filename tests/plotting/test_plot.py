"""Pictures of runs: made from the record alone, and refused with a reason."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import paragrad as pg
from paragrad.cli.main import app
from paragrad.errors import UsageError
from paragrad.models import toys
from paragrad.plotting import curves, plot
from paragrad.rundir import record
from paragrad.types import Event

pytest.importorskip("matplotlib", reason="pip install '.[plot]'")


def write(directory: Path, model: str, events: list[dict[str, Any]]) -> Path:
    directory.mkdir()
    (directory / "run.toml").write_text(f'model = "{model}"\n')
    (directory / "record.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


def start(engine: str = "local:workers=2") -> dict[str, Any]:
    return {"event": "start", "time": 0.0, "scheme": "agn:window=5", "engine": engine, "workers": 2, "rows": 640}


def commit(clock: int, **data: Any) -> dict[str, Any]:
    return {
        "event": "commit",
        "time": 0.1 * clock,
        "clock": clock,
        "worker": clock % 2,
        "loss": 1 / clock,
        "rows": 64,
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
    points = [{"seconds": k, "clock": k, "loss": 1 / k, "accuracy": 1 - 0.5 / k} for k in range(1, 5)]
    looks = [{"event": "validation", "time": point["seconds"], **point} for point in points]
    return write(tmp_path / "other", "mlp", [start(), *(commit(k) for k in range(1, 200)), *looks])


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize("run", ["toy", "other"])
def test_a_run_becomes_a_png(run: str, request: pytest.FixtureRequest) -> None:
    made = plot.plot([request.getfixturevalue(run)])
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


def of(*events: dict[str, Any], engine: str = "local", x: str = "epochs", **more: Any) -> curves.Curves:
    """The curves of a record with these events."""
    told = [Event(data.pop("event"), data.pop("time"), data) for data in (dict(e) for e in (start(engine) | more, *events))]
    return curves.read(told, name="run", x=x)


def look(clock: int, time: float = 0.0, **found: float | None) -> dict[str, Any]:
    return {"event": "validation", "time": time, "seconds": time, "clock": clock, **found}


def test_simulated_seconds_are_called_virtual() -> None:
    for more, name in (({"cluster": "homogeneous"}, "virtual seconds"), ({}, "seconds")):
        run = of(look(0, 1.0, loss=1.0), engine="vector", x="seconds", **more)
        assert curves.draw([run], title="", x="seconds").axes[-1].get_xlabel() == name


@pytest.mark.parametrize(
    ("x", "commits", "looks"),
    [
        ("epochs", [0.1, 0.2, 0.3], [0, 0.2]),
        ("samples", [64, 128, 192], [0, 128]),
        ("updates", [1, 1, 2], [0, 1]),
        ("seconds", [0.1, 0.2, 0.3], [0.0, 0.25]),
    ],
)
def test_curves_are_over_the_axis_that_is_asked_for(x: str, commits: list[float], looks: list[float]) -> None:
    # Two commits are one round. What is looked at is the center of update 1, whenever the figures come.
    events = [commit(k) | {"clock": clock} for k, clock in ((1, 1), (2, 1), (3, 2))]
    run = of(look(0, 0.0, loss=3.0), *events[:2], look(1, 0.25, loss=2.0), events[2], x=x)
    assert run.training.x.tolist() == pytest.approx(commits)
    assert run.validation["loss"].x.tolist() == pytest.approx(looks)


def test_a_validation_that_counts_its_samples_is_believed() -> None:
    run = of(commit(1), look(1, loss=1.0, samples=320, epoch=0.5))
    assert run.validation["loss"].x.tolist() == [0.5]
    assert list(run.validation) == ["loss"]


def test_what_a_resumed_run_went_back_behind_is_not_drawn() -> None:
    back = {"event": "resume", "time": 0.1, "clock": 1}
    run = of(commit(1), look(1, loss=3.0), commit(2), look(2, loss=9.0), back, commit(2), look(2, loss=2.0))
    assert run.validation["loss"].y.tolist() == [3.0, 2.0]
    assert run.validation["loss"].x.tolist() == pytest.approx([0.1, 0.2])
    assert len(run.training.x) == 2


def test_an_axis_that_there_is_not_is_named(other: Path) -> None:
    with pytest.raises(UsageError, match=r"Unknown axis 'epoch'. Did you mean 'epochs'\?"):
        plot.plot([other], x="epoch")


NUMBERS = st.floats(-1e99, 1e99, allow_subnormal=False)


@given(st.lists(NUMBERS, min_size=1), st.booleans())
def test_every_value_is_on_its_axis(values: list[float], unit: bool) -> None:
    low, high, scale = curves.limits(values, unit=unit)
    assert low < high
    assert max(values) <= high
    if scale == "log":
        assert min(values) >= 0
        assert low > 0
        assert all(low <= value for value in values if value > max(values) / curves.HUGE)
    else:
        assert low <= min(values)


@given(st.lists(st.floats(0, 1), min_size=1))
def test_an_axis_of_accuracy_neither_zooms_into_noise_nor_leaves_0_and_1(values: list[float]) -> None:
    low, high, scale = curves.limits(values, unit=True)
    assert scale == "linear"
    assert high - low >= curves.LEAST_UNIT
    margin = (high - low) * 0.05 / 1.1 + 1e-12
    assert low >= -margin
    assert high <= 1 + margin


def test_a_loss_that_falls_by_decades_is_on_a_logarithmic_axis_and_noise_is_not_zoomed_into() -> None:
    assert curves.limits([8000.0, 300.0, 35.0])[2] == "log"
    assert curves.limits([8000.0, 300.0, 0.0])[2] == "log"
    low, high, scale = curves.limits([3.301, 3.302, 3.299])
    assert scale == "linear"
    assert high - low > 0.6
    assert curves.limits([1e5, -2.0, -3.0, -3.1])[2] == "symlog"
    assert curves.limits([2.0, -2.0, -3.0, -3.1])[2] == "linear"


def test_the_first_points_are_inside_the_picture() -> None:
    run = of(look(0, loss=8000.0, accuracy=0.1), *(commit(k, loss=8000 / k**2) for k in range(1, 200)))
    for axes in curves.draw([run], title="", x="epochs").axes:
        (low, high), (left, _) = axes.get_ylim(), axes.get_xlim()
        for line in axes.lines:
            assert low <= line.get_ydata()[0] <= high
            assert left < line.get_xdata()[0]


ODD = {
    "negative": [*(commit(k, loss=5 / k - 3) for k in range(1, 90)), look(3, loss=-2.0, r2=-0.5)],
    "diverged": [
        *(commit(k, loss=2.0**k if k < 50 else None) for k in range(1, 90)),
        look(60, loss=float("nan"), accuracy=0.1),
    ],
    "nothing finite": [commit(1, loss=None), look(1, loss=None, accuracy=None)],
    "infinite": [commit(1, loss=float("inf")), look(1, loss=float("-inf"))],
    "single commit": [commit(1)],
    "single validation": [look(0, loss=2.3, accuracy=0.1)],
    "zero": [commit(1, loss=0.0), look(1, loss=0.0)],
    "flow": [*(commit(k, loss=1e6 / k**4 - 3) for k in range(1, 90)), look(3, loss=-2.0)],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_runs_are_drawn(name: str, tmp_path: Path) -> None:
    assert size(plot.plot([write(tmp_path / "run", "mlp", [start(), *ODD[name]])]))[0] == 720


def test_values_that_are_not_finite_are_marked() -> None:
    (panel, _) = curves.draw([of(*ODD["diverged"])], title="", x="epochs").axes
    (marks,) = [line for line in panel.lines if line.get_label() == "NaN or infinite"]
    assert len(marks.get_xdata()) == 41


def test_several_runs_are_drawn_over_each_other(toy: Path, other: Path, tmp_path: Path) -> None:
    args = ("plot", str(toy), str(other), "--x", "seconds", "--out", str(tmp_path / "both.png"))
    done = CliRunner().invoke(app, args, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert size(tmp_path / "both.png")[1] > 528
    with pytest.raises(UsageError, match=r"empty' has neither a commit nor a validation"):
        plot.plot([toy, write(tmp_path / "empty", "mlp", [start()])])


def test_every_run_has_a_line_of_its_own_in_the_legend() -> None:
    runs = [of(look(1, loss=1.0, accuracy=0.1 * k)) for k in range(10)]
    figure = curves.draw(runs, title="", x="epochs")
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts[-1] == "run: loss 1, accuracy 0.9"
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == 10


def test_one_toy_is_a_path_and_with_an_axis_it_is_a_curve(toy: Path) -> None:
    path, curve = (plot.plot([toy], x=x).read_bytes() for x in (None, "updates"))
    assert path != curve


def test_smoothing_keeps_a_constant_and_the_length() -> None:
    assert curves.smoothed(np.full(200, 3.0)).tolist() == pytest.approx([3.0] * 200)
    assert curves.smoothed(np.arange(3.0)).tolist() == [0, 1, 2]


@given(st.integers(0, 400), st.integers(0, 2**32 - 1))
def test_smoothing_is_the_mean_of_what_came_just_before(length: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=length)
    width = max(1, length // 50)
    plain = [values[max(0, k + 1 - width) : k + 1].mean() for k in range(length)]
    assert curves.smoothed(values).tolist() == pytest.approx(plain)


def test_a_burst_does_not_spoil_what_comes_after_it() -> None:
    values = np.ones(500)
    values[3] = 1e30
    assert curves.smoothed(values)[50:].tolist() == [1.0] * 450


def test_a_path_that_flies_away_does_not_shrink_the_rest_to_a_dot(tmp_path: Path) -> None:
    toy = toys.Beale()
    trace = plot.Trace(centers=[(1.0, -1.0), (1e9, -1e12), (float("inf"), 0.0)])
    low, high = plot.path(toy, trace, title="").axes[0].get_xlim()
    assert high - low < 10


def test_what_is_no_run_is_named(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no run in .*nowhere.* no record.jsonl"):
        plot.plot([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match=r"mine.gif.*\.png"):
        plot.plot([toy], tmp_path / "mine.gif")
    with pytest.raises(UsageError, match=r"gone/mine.png' cannot be written"):
        plot.plot([toy], tmp_path / "gone" / "mine.png")
    with pytest.raises(UsageError, match="nothing to draw"):
        plot.plot([write(tmp_path / "empty", "mlp", [start()])])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'matplotlib>=3.8'"):
        plot.plot([toy])
