"""The vector engine as a user meets it: runs that repeat to the byte, what it says of itself, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.data.source import Arrays
from paragrad.engines.process import devices
from paragrad.models import toys
from paragrad.rundir.record import batches_used, read
from paragrad.schemes.traits import name_of

pytestmark = pytest.mark.usefixtures("one_thread")


def easy(count=240, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=generator, dtype=dtype)
    return Arrays((x, (x[:, 0] > 0).long()))


def run(out, model=None, data=None, **options):
    events = []
    options = {"optimizer": "sgd:lr=0.1", "batch_size": 8, "engine": pg.Vector(4), "scheme": pg.AGN(window=3), **options}
    torch.manual_seed(0)
    result = pg.train(
        model or nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)),
        data or easy(),
        run=pg.Run(out=out, callbacks=(events.append,), **options.pop("run", {})),
        **options,
    )
    return result, [event.data["message"] for event in events if event.kind in ("note", "warning")]


def contents(path: Path):
    return (path / "record.jsonl").read_bytes(), (path / "model.safetensors").read_bytes()


def test_a_thousand_workers_twice_give_the_same_bytes(tmp_path):
    cluster = pg.Cluster(
        speeds=pg.LogNormal(1.0, 0.5),
        latency=pg.Exponential(0.01),
        churn=pg.Churn(up=pg.Exponential(40.0), down=2.0),
        faults=(pg.Crash(worker=7, at=2.0), pg.DropMessage(worker=3, at=1.0), pg.DuplicateMessage(worker=4, at=1.0)),
    )
    for name in ("one", "two"):
        run(
            tmp_path / name,
            data=easy(4000),
            validation=easy(60),
            batch_size=1,
            engine=pg.Vector(workers=1000, cluster=cluster),
            scheme=pg.AGN(window=2),
            run={"validate_every": "1s", "checkpoint_every": 0.2},
        )
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    commits = [event for event in read(tmp_path / "one" / "record.jsonl") if event.kind == "commit"]
    assert len({event.data["worker"] for event in commits}) > 900
    assert set(batches_used(read(tmp_path / "one" / "record.jsonl")).values()) == {1}


def test_another_seed_gives_another_record(tmp_path):
    cluster = pg.Cluster(speeds=pg.Exponential(1.0))
    for seed in (0, 1):
        run(tmp_path / str(seed), seed=seed, engine=pg.Vector(4, cluster=cluster))
    assert contents(tmp_path / "0")[0] != contents(tmp_path / "1")[0]


def test_its_run_toml_repeats_it(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from paragrad.cli.main import app

    first = ["train", "--model", "beale:noise=0.1", "--engine", "vector", "--workers", "3", "--cluster"]
    first += ["straggler:latency=exponential(0.1)", "--optimizer", "sgd:lr=0.002", "--quiet", "--out", str(tmp_path / "a")]
    for words in (first, ["train", str(tmp_path / "a" / "run.toml"), "--quiet", "--out", str(tmp_path / "b")]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_the_summary_tells_what_the_cluster_cost(tmp_path):
    cluster = pg.Cluster(speeds=(1.0, 1.0, 1.0, 2.0), latency=0.5, bandwidth=1e6)
    result, _ = run(tmp_path / "run", scheme=pg.SyncSGD(), engine=pg.Vector(4, cluster=cluster))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    cost, parameters = summary["cluster"], 6 * 5 + 5 + 5 * 2 + 2
    rounds = 8  # 30 mini-batches for 4 workers: the last round is of two
    transfer = parameters * 4 / 1e6
    # A round takes as long as its slowest worker, and a message each way; a last answer is not waited for.
    assert summary["seconds"] == pytest.approx(7 * (2.0 + 2 * (0.5 + transfer)) + (1.0 + 2 * (0.5 + transfer)))
    assert result.seconds == summary["seconds"]
    assert summary["wall_seconds"] > 0
    assert cost["bytes_to_center"] == [parameters * 4 * rounds] * 2 + [parameters * 4 * (rounds - 1)] * 2
    assert cost["idle_seconds"][0] > cost["idle_seconds"][3] > 0
    assert cost["computing_seconds"] == [8.0, 8.0, 7.0, 14.0]


def test_a_straggler_costs_a_synchronous_scheme_what_it_takes_longer(tmp_path):
    seconds = {}
    for scheme in (pg.SyncSGD(), pg.Downpour()):
        for cluster in (pg.Cluster(), pg.Cluster(faults=(pg.Slow(worker=0, at=0.0, factor=4.0),))):
            result, _ = run(
                tmp_path / f"{name_of(scheme)}-{len(cluster.faults)}", scheme=scheme, engine=pg.Vector(4, cluster=cluster)
            )
            seconds[name_of(scheme), len(cluster.faults)] = result.seconds
    assert seconds["syncsgd", 1] == pytest.approx(4 * seconds["syncsgd", 0], rel=0.15)
    assert seconds["downpour", 1] < 2 * seconds["downpour", 0]


def test_backup_workers_do_not_leave_dropped_rows_to_the_slow_one(tmp_path):
    seconds = {}
    for scheme in (pg.SyncSGD(), pg.BackupWorkers()):
        engine = pg.Vector(4, cluster=pg.Cluster(faults=(pg.Slow(worker=0, at=0.0, factor=4.0),)))
        seconds[name_of(scheme)] = run(tmp_path / name_of(scheme), scheme=scheme, engine=engine, epochs=3)[0].seconds
    assert seconds["backupworkers"] < 0.5 * seconds["syncsgd"]


def test_a_module_of_float64_is_computed_together(tmp_path):
    _, notes = run(tmp_path / "run", nn.Linear(6, 2).double(), easy(dtype=torch.float64))
    assert not [note for note in notes if "one after another" in note]


def test_max_seconds_are_virtual(tmp_path):
    result, _ = run(tmp_path / "run", epochs=1000, run={"stop": pg.Stop(seconds=50.0)})
    assert result.stopped == "seconds"
    assert result.seconds == 50.0
    commits = [event for event in read(tmp_path / "run" / "record.jsonl") if event.kind == "commit"]
    assert max(event.time for event in commits) <= 50.0


def test_a_run_can_be_resumed_and_uses_every_row_once(tmp_path):
    class Enough:
        def __init__(self):
            self.commits = 0

        def __call__(self, event):
            self.commits += event.kind == "commit"
            return self.commits >= 4

    options = {
        "engine": pg.Vector(4, cluster=pg.Cluster(speeds=pg.Exponential(1.0))),
        "scheme": pg.AGN(window=3),
        "batch_size": 8,
    }
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    pg.train(model, easy(), optimizer="sgd:lr=0.1", run=pg.Run(out=tmp_path / "run", callbacks=(Enough(),)), **options)
    result = pg.train(model, easy(), optimizer="sgd:lr=0.1", run=pg.Run(out=tmp_path / "run", resume=True), **options)
    here = 240 - 4 * 3 * 8
    assert result.summary["samples_per_second"] == pytest.approx(here / result.summary["wall_seconds"], rel=0.1)
    events = list(read(tmp_path / "run" / "record.jsonl"))
    assert set(batches_used(events).values()) == {1}
    assert len(batches_used(events)) == 30
    times = [event.time for event in events if event.kind == "commit"]
    assert times == sorted(times)


# -- models that cannot be computed together --------------------------------------------------------------------------


class Branches(nn.Module):
    """Looks at a value to decide what to do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        return self.layer(x) if float(x.sum()) > 0 else -self.layer(x)


@pytest.mark.parametrize(
    ("model", "optimizer", "why"),
    [
        (Branches(), "sgd:lr=0.1", "data-dependent control flow"),
        (nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2)), "sgd:lr=0.1", "random numbers"),
        (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), "rprop", "Rprop has no batched version"),
        (nn.Sequential(nn.Linear(6, 2)).to(torch.bfloat16), "sgd:lr=0.1", "coarser"),
    ],
    ids=["control flow", "dropout", "optimiser", "bfloat16"],
)
def test_what_cannot_be_computed_together_is_looped_over_and_said_once(tmp_path, model, optimizer, why):
    dtype = next(model.parameters()).dtype
    x, y = easy().tree
    data = Arrays((x.to(dtype), y))
    result, notes = run(tmp_path / "auto", model, data, optimizer=optimizer)
    said = [note for note in notes if "one after another" in note]
    assert len(said) == 1
    assert why in said[0]
    looped, notes = run(tmp_path / "loop", model, data, optimizer=optimizer, engine=pg.Vector(4, mode="loop"))
    assert not [note for note in notes if "one after another" in note]
    for a, b in zip(result.model.parameters(), looped.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_computing_together_is_refused_where_it_was_asked_for_and_cannot_be(tmp_path):
    with pytest.raises(pg.UsageError, match="cannot be computed together: the model's operations depend on the values"):
        run(tmp_path / "run", Branches(), engine=pg.Vector(4, mode="together"))
    assert not (tmp_path / "run").exists()


def test_a_recurrent_network_trains(tmp_path):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.cell(x.view(-1, 3, 2))[0][:, -1])

    result, notes = run(tmp_path / "run", Recurrent(), epochs=2)
    assert result.summary["commits"] > 0
    assert len([note for note in notes if "one after another" in note]) <= 1


def test_a_learner_of_ones_own_is_simulated_too(tmp_path):
    from paragrad.laws.bowl import Bowl

    rows = torch.randn(60, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    result = pg.train(
        Bowl, rows, scheme=pg.AEASGD(window=2), engine=pg.Vector(5), batch_size=2, run=pg.Run(out=tmp_path / "run")
    )
    assert result.summary["steps"] == 30


# -- bad input --------------------------------------------------------------------------------------------------------


def test_more_speeds_than_workers_are_refused():
    with pytest.raises(pg.UsageError, match="speeds has values for 3 workers, but there are 2"):
        pg.Vector(2, cluster=pg.Cluster(speeds=(1.0, 2.0, 3.0)))


def test_a_fault_for_a_worker_that_does_not_exist_is_refused():
    with pytest.raises(pg.UsageError, match="worker 9"):
        pg.Vector(2, cluster=pg.Cluster(faults=(pg.Crash(worker=9, at=1.0),)))


def test_a_negative_time_is_refused():
    with pytest.raises(pg.UsageError, match="at=-1"):
        pg.Crash(worker=0, at=-1.0)
    with pytest.raises(pg.UsageError, match="latency"):
        pg.Cluster(latency=-0.5)


def test_a_cluster_that_loses_all_its_workers_says_so(tmp_path):
    cluster = pg.Cluster(faults=(pg.Leave(worker=0, at=2.5), pg.Leave(worker=1, at=4.5)))
    with pytest.raises(pg.UsageError, match="no worker left"):
        run(tmp_path / "run", engine=pg.Vector(2, cluster=cluster))


def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(pg.UsageError, match="device='nonesuch' cannot be used here"):
        run(tmp_path / "run", engine=pg.Vector(2, device="nonesuch"))
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_too_large_is_refused_with_the_estimate(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "room", lambda device: 20_000)
    with pytest.raises(
        pg.UsageError, match=r"100 workers of 47 parameters need about .* KiB, .* but cpu has 20 KiB: use fewer"
    ):
        run(tmp_path / "run", engine=pg.Vector(100), data=easy(2400))
    assert not (tmp_path / "run").exists()


def test_rows_are_chunked_where_memory_is_short(tmp_path, monkeypatch):
    whole, _ = run(tmp_path / "whole", engine=pg.Vector(8))
    monkeypatch.setattr(devices, "room", lambda device: 16_000)
    chunked, _ = run(tmp_path / "chunked", engine=pg.Vector(8))
    for a, b in zip(whole.model.parameters(), chunked.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"workers": 0}, "at least 1 worker"),
        ({"mode": "fast"}, "mode='fast'"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"chunk": 0}, "chunk=0"),
        ({"cluster": "straggler"}, "is not a Cluster"),
    ],
)
def test_what_makes_no_sense_is_refused(options, why):
    with pytest.raises(pg.UsageError, match=why):
        pg.Vector(**options)


def test_distances_are_measured_by_the_workers(tmp_path):
    run(tmp_path / "run", run={"distances": True})
    commits = [event.data for event in read(tmp_path / "run" / "record.jsonl") if event.kind == "commit"]
    assert all(commit["distance"] > 0 for commit in commits if commit["sequence"] > 1)
    assert all("distance" not in commit for commit in commits if commit["sequence"] == 1)


def test_a_toy_keeps_its_trajectory(tmp_path):
    pg.train(
        toys.Booth(), "noise:rows=60", optimizer="sgd:lr=0.01", batch_size=1, scheme=pg.AGN(window=3), engine=pg.Vector(4),
        run=pg.Run(out=tmp_path / "run"),
    )  # fmt: skip
    commits = [event.data for event in read(tmp_path / "run" / "record.jsonl") if event.kind == "commit"]
    assert all(len(commit["path"]) == 2 and len(commit["center"]) == 2 for commit in commits)
