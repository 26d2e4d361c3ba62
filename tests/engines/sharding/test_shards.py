"""Real runs whose center is spread over processes: the same result, also where one of them is killed, or all of them are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.rundir.record import read
from tests.conftest import Watch, every_batch_once, train

pytest.importorskip("pyarrow.flight")
TOTAL = 50 * 2


@pytest.fixture
def model() -> nn.Module:
    """With buffers, which stay with the center's own process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def weights(result: pg.Result) -> torch.Tensor:
    return torch.cat([t.flatten().double() for t in result.model.state_dict().values()])


def spread(model, rows, out, watch=None, *, shards, workers=1, scheme=pg.AGN(window=3), **run):  # noqa: B008
    engine = pg.Network(workers=workers, here=workers, shards=shards)
    return train(model, (rows[0], rows[1]), out, watch, scheme=scheme, engine=engine, epochs=2, run=run)


def test_a_run_whose_center_is_spread_gives_the_same_bits_also_where_a_shard_is_killed(model, rows, tmp_path):
    def kill(watch: Watch, event: pg.Event) -> None:
        (pid,) = [e.data["pid"] for e in watch.events if e.kind == "shard" and e.data["index"] == 2]
        os.kill(pid, signal.SIGKILL)

    whole = spread(model, rows, tmp_path / "whole", shards=1)
    watch = Watch(at=7, act=kill)
    result = spread(model, rows, tmp_path / "spread", watch, shards=3)
    assert torch.equal(weights(result), weights(whole))
    assert every_batch_once(result.directory, TOTAL)
    assert result.summary["commits"] == whole.summary["commits"]
    assert watch.kinds()["shard"] == 3
    assert any("Shard 2 was ended by SIGKILL" in e.data["message"] for e in watch.events if e.kind == "warning")
    assert not list(result.directory.glob("shard-*.json"))


def test_rounds_of_two_workers_give_the_same_bits_and_the_spread_center_is_validated(model, rows, tmp_path):
    watch = Watch()
    results = []
    for shards in (1, 2):
        torch.manual_seed(0)
        data = (rows[0][:320], rows[1][:320])
        engine = pg.Network(workers=2, here=2, shards=shards)
        run = pg.Run(out=tmp_path / str(shards), validate_every=3, keep="best", callbacks=(watch,))
        results.append(
            pg.train(
                model,
                data,
                validation=(rows[0][320:], rows[1][320:]),
                scheme=pg.ModelAveraging(window=3),
                optimizer="sgd:lr=0.1",
                batch_size=8,
                epochs=4,
                engine=engine,
                run=run,
            )
        )
    assert torch.equal(weights(results[0]), weights(results[1]))
    assert results[0].summary["test_loss"] == results[1].summary["test_loss"]
    curves = [[(look["clock"], look["loss"]) for look in result.history] for result in results]
    assert curves[0] == curves[1]
    assert [clock for clock, _ in curves[0]] == list(range(0, 28, 3))


def test_neither_a_killed_shard_nor_a_killed_worker_costs_a_row(model, rows, tmp_path):
    def kill(watch: Watch, event: pg.Event) -> None:
        os.kill(next(e.data["pid"] for e in watch.events if e.kind == "shard"), signal.SIGKILL)
        watch.signal(1 - event.data["worker"], signal.SIGKILL)

    watch = Watch(at=6, act=kill)
    result = spread(model, rows, tmp_path / "run", watch, shards=2, workers=2, scheme=pg.AEASGD(window=2))
    assert every_batch_once(result.directory, TOTAL)
    assert result.summary["samples"] == 400 * 2
    assert result.summary["lost_workers"] >= 1
    assert watch.kinds()["shard"] == 2


def test_a_center_that_is_read_between_exchanges_is_read_at_one_clock(model, rows, tmp_path):
    scheme = pg.AEASGD(window=2, alpha=0.2, atomic=False)
    whole, result = (spread(model, rows, tmp_path / str(s), shards=s, scheme=scheme) for s in (1, 2))
    assert torch.equal(weights(result), weights(whole))
    twice = spread(model, rows, tmp_path / "two", shards=2, workers=2, scheme=pg.GEM(window=2))
    assert every_batch_once(twice.directory, TOTAL)


SCRIPT = """
    import os, signal, sys, torch
    import paragrad as pg
    from torch import nn

    class Kill:
        commits = 0
        def __call__(self, event):
            self.commits += event.kind == "commit"
            if self.commits == 9:
                os.kill(os.getpid(), signal.SIGKILL)

    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
    run = pg.Run(out=sys.argv[1], callbacks=(Kill(),), checkpoint_every=None)
    pg.train(model, (x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()), optimizer="sgd:lr=0.1", batch_size=8, epochs=2,
             scheme=pg.ADAG(window=3), engine=pg.Network(workers=1, here=1, shards=3), run=run)
"""


def test_a_spread_center_that_is_killed_with_all_its_shards_goes_on_from_what_they_left(model, rows, tmp_path):
    out = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(out)], capture_output=True, timeout=300, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    whole = spread(model, rows, tmp_path / "whole", shards=1, scheme=pg.ADAG(window=3))
    result = spread(model, rows, out, shards=3, scheme=pg.ADAG(window=3), resume=True)
    assert any(event.kind == "restart" and event.data["clock"] >= 8 for event in read(out / "record.jsonl"))
    assert torch.equal(weights(result), weights(whole))
    assert every_batch_once(out, TOTAL)


def test_a_shard_may_be_started_by_hand_and_started_again_after_a_kill(model, rows, tmp_path):
    out, held = tmp_path / "run", []

    def begin() -> None:
        command = [sys.executable, "-m", "paragrad", "shard", str(out), "--index", "2"]
        held.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))

    def kill(watch: Watch, event: pg.Event) -> None:
        held[0].kill()
        begin()

    begin()
    try:
        engine = pg.Network(workers=1, here=1, shards=3, shards_elsewhere=1, tls="on")
        watch = Watch(at=7, act=kill)
        result = train(model, (rows[0], rows[1]), out, watch, scheme=pg.AGN(window=3), engine=engine, epochs=2)
        said, _ = held[1].communicate(timeout=60)
    finally:
        for process in held:
            process.kill()
            process.communicate()
    assert held[1].returncode == 0, said
    assert "listens at" in said
    assert "The run is over." in said
    whole = spread(model, rows, tmp_path / "whole", shards=1)
    assert torch.equal(weights(result), weights(whole))
    assert every_batch_once(out, TOTAL)


def test_what_cannot_be_spread_is_refused_with_the_reason(model, rows, tmp_path):
    with pytest.raises(pg.UsageError, match="at least 1 process"):
        pg.Network(shards=0)
    with pytest.raises(pg.UsageError, match="shards_elsewhere=2, but it must be 0 to 1"):
        pg.Network(shards=2, shards_elsewhere=2)
    with pytest.raises(pg.UsageError, match="for one host"):
        pg.Network(shards=2, shards_elsewhere=1, certificate="a.pem", key="a.key")
    cases = {
        "a shard holds at least 17 of them. Use 12 or fewer": (pg.AGN(), 13),
        "share their weights": (pg.Hogwild(), 2),
    }
    for message, (scheme, shards) in cases.items():
        with pytest.raises(pg.UsageError, match=message):
            spread(model, rows, tmp_path / "never", shards=shards, scheme=scheme)


def test_schemes_that_must_see_the_whole_vector_are_refused(model, rows, tmp_path):
    class Norm(pg.Scheme):
        def scale(self, commit: pg.Commit) -> float:
            return 1.0 / float(commit.value.norm())

    class Fragments(pg.Scheme):
        parts = 2
        elementwise = True

        def scale(self, commit: pg.Commit) -> float:
            return 1.0

    for scheme, message in ((Norm(), "does not set elementwise"), (Fragments(), "in 2 parts")):
        with pytest.raises(pg.UsageError, match=message):
            spread(model, rows, tmp_path / "never", shards=2, scheme=scheme)


def test_a_run_directory_says_where_the_shards_are(model, rows, tmp_path: Path):
    from paragrad.engines.transport.endpoint import Endpoint

    found: list[Endpoint] = []
    watch = Watch(at=1, act=lambda watch, event: found.append(Endpoint.read(tmp_path / "run")))
    spread(model, rows, tmp_path / "run", watch, shards=2)
    (endpoint,) = found
    assert len(endpoint.shards) == 1
    assert endpoint.shards[0].startswith("127.0.0.1:")
    assert endpoint.shards[0] != endpoint.address


def test_shards_of_a_center_and_a_partition_of_rows_are_both_in_a_run_toml(tmp_path):
    from paragrad.cli.train import gather

    (tmp_path / "run.toml").write_text('data = "digits"\nengine = "network:workers=2,shards=3"\npartition = "dealt"\n')
    settings, _ = gather(tmp_path / "run.toml", None, {})
    assert (settings["engine"], settings["partition"]) == ("network:workers=2,shards=3", "dealt")
