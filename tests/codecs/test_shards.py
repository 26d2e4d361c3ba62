"""Coded commits and a center that is spread: they are cut as they are, so that S shards make the same of them as one center."""

from __future__ import annotations

import copy
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.codecs.codec import Piece
from paragrad.engines.process import mapped_file
from paragrad.engines.process.signals import ECHO
from paragrad.engines.sharding.process import ShardService
from paragrad.engines.transport.header import CODED
from paragrad.engines.transport.message import Malformed, declare
from paragrad.rundir import checkpoint
from paragrad.rundir.record import read
from tests.conftest import Watch, every_batch_once, stop_after, train

pytest.importorskip("pyarrow.flight")
TOTAL = 50 * 2
TWO: dict[str, Any] = {"workers": 2, "here": 2, "threads": 1}
CODECS = [pg.BF16(), pg.Int8(block=32), pg.OneBit(block=24), pg.Threshold(0.01, values=False), pg.TopK(0.1)]


def weights(result: pg.Result) -> torch.Tensor:
    return torch.cat([t.flatten().double() for t in result.model.state_dict().values()])


def coded(model: nn.Module, rows: Any, out: Any, engine: Any, watch: Any = None, **options: Any) -> pg.Result:
    settings = {"scheme": pg.SyncSGD(), "optimizer": "adam:lr=0.01", "codec": pg.TopK(0.1), "epochs": 2} | options
    return train(copy.deepcopy(model), (rows[0], rows[1]), out, watch, engine=engine, **settings)


def bytes_of(result: pg.Result) -> list[int]:
    return [event.data["bytes"] for event in read(result.directory) if event.kind == "commit"]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_coded_commits_to_a_spread_center_end_on_the_bits_of_one_center_also_where_a_shard_is_killed(
    codec, model, rows, tmp_path
):
    def kill(watch: Watch, event: pg.Event) -> None:
        os.kill(next(e.data["pid"] for e in watch.events if e.kind == "shard"), signal.SIGKILL)

    whole = coded(model, rows, tmp_path / "whole", pg.Local(workers=2, threads=1), codec=codec)
    watch = Watch(at=31, act=kill)
    result = coded(model, rows, tmp_path / "spread", pg.Network(shards=3, **TWO), watch, codec=codec)
    assert watch.kinds()["shard"] == 3
    assert torch.equal(weights(result), weights(whole))
    assert every_batch_once(result.directory, TOTAL)
    more = 8 if isinstance(codec, pg.Threshold) else 0  # its step goes to each shard
    there, here = bytes_of(result), bytes_of(whole)
    assert sum(n + more for n in here) == sum(there) == result.summary["bytes_sent"]
    assert pg.replay(result.directory, copy.deepcopy(model), rows, optimizer="adam:lr=0.01").equal


@pytest.mark.parametrize(
    "engines",
    [
        [pg.Network(shards=3, **TWO), pg.Network(shards=2, **TWO), pg.Local(workers=2, threads=1)],
        [pg.Network(shared=False, **TWO), pg.Local(workers=2, threads=1), pg.Network(shards=2, **TWO)],
    ],
    ids=["fewer", "elsewhere"],
)
def test_a_run_with_a_codec_that_was_stopped_goes_on_with_other_shards_and_ends_on_the_same_bits(
    engines, model, rows, tmp_path
):
    whole = coded(model, rows, tmp_path / "whole", pg.Local(workers=2, threads=1))
    out = tmp_path / "run"
    for number, engine in enumerate(engines):
        last = engine is engines[-1]
        run = {"resume": number > 0, "checkpoint_every": None}
        result = coded(model, rows, out, engine, None if last else stop_after(22), run=run)
        assert result.stopped == ("finished" if last else "callback")
    assert torch.equal(weights(result), weights(whole))
    assert every_batch_once(out, TOTAL)


SCRIPT = """
    import os, sys, time, torch
    import paragrad as pg
    from torch import nn

    class Slow(nn.Linear):
        def forward(self, x):
            time.sleep(0.005)
            return super().forward(x)

    def slow(event):
        if event.kind == "commit" and os.path.exists("wait"):
            time.sleep(60)
        return sys.argv[1] == "on" and event.kind == "commit" and event.data["clock"] > 40

    x = torch.randn(400, 50, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    try:
        pg.train(Slow(50, 2), (x, (x.sum(1) > 0).long()), optimizer="sgd:lr=0.1", batch_size=8, epochs=400, codec=pg.TopK(0.1),
                 scheme=pg.AGN(window=2), engine=pg.Network(workers=2, here=2, shards=3, threads=1),
                 run=pg.Run("run", resume=sys.argv[1] == "on", checkpoint_every=None, validate_every=None, callbacks=(slow,)))
    except pg.Interrupted as stop:
        print("INTERRUPTED", stop)
"""


def started(folder: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), how]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_commits(folder: Path, process: subprocess.Popen[str], least: int) -> None:
    record = folder / "run" / "record.jsonl"
    while sum(event.kind == "commit" for event in (read(record) if record.exists() else ())) < least:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_a_signal_to_all_processes_of_a_run_stops_it_with_all_that_they_hold(tmp_path):
    """As a batch system ends a job."""
    with started(tmp_path, "anew") as center:
        wait_for_commits(tmp_path, center, 9)
        for _ in range(2):
            os.killpg(center.pid, signal.SIGTERM)
        said, wrong = center.communicate(timeout=60)
    assert "and has a checkpoint" in said, wrong
    assert "To go on: call pg.train again with run=pg.Run(out='run', resume=True)" in said
    found = checkpoint.load(max((tmp_path / "run" / "checkpoints").iterdir()))
    assert {"residual.0", "residual.1"} <= set(found.tensors)
    assert not [event for event in read(tmp_path / "run") if event.kind in ("lost", "warning")]


def test_a_spread_center_that_is_interrupted_a_second_time_ends_at_once_and_goes_on_from_memory(tmp_path):
    with started(tmp_path, "anew") as center:
        wait_for_commits(tmp_path, center, 9)
        (tmp_path / "wait").touch()
        time.sleep(0.5)
        os.killpg(center.pid, signal.SIGINT)
        time.sleep(ECHO + 0.5)
        os.killpg(center.pid, signal.SIGINT)
        said, wrong = center.communicate(timeout=60)
    assert "INTERRUPTED The run was ended at once; its state is in the memory of this machine." in said, wrong
    assert not [event for event in read(tmp_path / "run") if event.kind == "warning"]
    (tmp_path / "wait").unlink()
    before = max(event.data["clock"] for event in read(tmp_path / "run") if event.kind == "commit")
    with started(tmp_path, "on") as center:
        _, wrong = center.communicate(timeout=120)
    assert center.returncode == 0, wrong
    (restarted,) = [event.data["clock"] for event in read(tmp_path / "run") if event.kind == "restart"]
    assert before - 1 <= restarted <= before
    assert not list((tmp_path / "run").glob("shard-*.json"))


def test_shards_that_are_started_by_hand_know_the_codec(model, rows, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "paragrad", "shard", str(out), "--index", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as held:
        try:
            engine = pg.Network(shards=2, shards_elsewhere=1, **TWO)
            result = coded(model, rows, out, engine, codec=pg.Int8(block=16))
            said, _ = held.communicate(timeout=60)
        finally:
            held.kill()
    assert held.returncode == 0, said
    whole = coded(model, rows, tmp_path / "whole", pg.Local(workers=2, threads=1), codec=pg.Int8(block=16))
    assert torch.equal(weights(result), weights(whole))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_coded_commit_that_is_not_finite_is_refused_and_no_shard_sees_it(codec, rows, tmp_path):
    class Once(nn.Module):
        """NaN in its 7th step."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.steps = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += self.training
            return self.inner(x) * (math.nan if self.steps == 7 else 1.0)

    engine = pg.Network(workers=1, here=1, shards=2, threads=1)
    torch.manual_seed(0)
    result = coded(Once(), rows, tmp_path / "run", engine, codec=codec, scheme=pg.AGN(window=3), optimizer="sgd:lr=0.1")
    assert [event.data["why"] for event in read(result.directory) if event.kind == "refused"] == ["not finite"]
    assert every_batch_once(result.directory, TOTAL)
    assert bool(torch.isfinite(weights(result)).all())


@dataclass(frozen=True)
class Mine(pg.Codec):
    """Sends everything."""

    def layout(self, length: int) -> dict[str, Piece]:
        return {"values": Piece(torch.float32, length)}

    def pack(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"values": vector.clone()}

    def unpack(self, coded: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(coded["values"])


class Cut(Mine):
    """The same, and says where it can be cut."""

    unit = 1

    def cut(self, coded: Mapping[str, torch.Tensor], lo: int, hi: int) -> dict[str, torch.Tensor]:
        return {"values": coded["values"][lo:hi]}


def test_codecs_that_cannot_be_cut_are_refused_with_the_reason(model, rows, tmp_path):
    cases = {
        "Mine does not define how an encoded vector is cut": (Mine(), {}),
        "keeps 2,048 elements together and the model has 178": (pg.Int8(), {}),
        "Cut is a custom codec": (Cut(), {"shards_elsewhere": 1}),
    }
    for message, (codec, more) in cases.items():
        with pytest.raises(pg.UsageError, match=message):
            coded(model, rows, tmp_path / "never", pg.Network(workers=2, here=2, shards=2, **more), codec=codec)


def test_a_codec_of_ones_own_that_says_how_it_is_cut_goes_to_shards(model, rows, tmp_path):
    spread = coded(model, rows, tmp_path / "spread", pg.Network(shards=2, **TWO), codec=Cut())
    whole = coded(model, rows, tmp_path / "whole", pg.Local(workers=2, threads=1), codec=Cut())
    assert torch.equal(weights(spread), weights(whole))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"value": torch.zeros(4)}, "same codec and model"),
        ({"coded.positions": torch.zeros(5, dtype=torch.int32), "coded.values": torch.zeros(5)}, "same codec and model"),
        ({"coded.positions": torch.tensor([1, 9], dtype=torch.int32), "coded.values": torch.zeros(2)}, "names position 9"),
        ({"coded.positions": torch.tensor([1], dtype=torch.int32), "coded.values": torch.zeros(2)}, "1 positions, but 2"),
    ],
    ids=["not coded", "too many", "beyond", "unequal"],
)
def test_a_shard_takes_nothing_that_the_codec_does_not_make(tensors, said, tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_file, "FAST", tmp_path)
    keeper = ShardService(pg.AGN(), tmp_path, 1, "a life", codec=pg.TopK(0.01))

    def exchange(head: dict[str, Any], vectors: dict[str, torch.Tensor]) -> None:
        told = {"start_id": "a life", "vectors": declare(vectors), **head}
        answer = keeper.exchange("test")
        for name, room in answer.begin(told).items():
            room.copy_(vectors[name])
        answer.finish(told)

    exchange({"op": "load", "clock": 3, "ledger": [1, 1], "versions": [3, 3]}, {"value": torch.zeros(4)})
    put = {"op": "put", "rank": 0, "incarnation": 0, "sequence": 2}
    with pytest.raises(Malformed, match=said):
        exchange(put, tensors)
    good = {CODED + name: tensor for name, tensor in pg.TopK(1.0).encode(torch.arange(4.0)).items()}
    exchange(put, good)
    assert keeper.held is not None
    assert torch.equal(keeper.held.room(0, 0, 2)["value"], torch.arange(4.0))
