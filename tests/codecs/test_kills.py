"""Real processes killed while they code a commit: what they had left out is not lost with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paragrad as pg
from paragrad.engines.process import mapped_file
from paragrad.engines.transport import endpoint
from paragrad.rundir import checkpoint
from paragrad.rundir.record import read
from tests.conftest import every_batch_once, stop_after
from tests.engines.exchange.kills import BATCH, Assassin
from tests.engines.exchange.victim import PACE, Counting, Doomed, minus

SIZE = 999
SCHEME = pg.Downpour(window=2)


def train_counting(
    model: Counting, batches: int, out: Path, *callbacks, codec: pg.Codec, workers: int
) -> tuple[pg.Result, bool]:
    """Each step adds one to every weight: what has reached the center and what is left over are all steps, to the bit.
    Returns the result, and whether anything is left over."""
    x = torch.zeros(batches * BATCH, 1)
    result = pg.train(
        model,
        (x, x),
        loss=minus,
        optimizer="sgd:lr=1",
        scheme=SCHEME,
        codec=codec,
        engine=pg.Local(workers=workers),
        batch_size=BATCH,
        run=pg.Run(out=out, callbacks=callbacks, checkpoint_every=None),
    )
    assert every_batch_once(out, batches)
    kept = load_file(max((out / "checkpoints").iterdir()) / "state.safetensors")
    assert torch.equal(kept["value"], result.model.weights.detach())
    left = [tensor for name, tensor in kept.items() if name.startswith("residual.")]
    assert len(left) == workers
    assert torch.equal(kept["value"] + sum(left), torch.full((SIZE,), float(batches)))
    return result, any(bool(residual.any()) for residual in left)


def test_a_worker_may_be_killed_at_any_line_of_a_coded_exchange_and_what_it_had_left_out_stays(tmp_path):
    count, deaths = tmp_path / "count", tmp_path / "deaths"
    count.mkdir()
    deaths.mkdir()
    codec = pg.TopK(0.3)
    model = Doomed(SIZE, window=SCHEME.window, deaths=count, lines=None)
    train_counting(model, 60, tmp_path / "counted", codec=codec, workers=2)
    total = max(len(json.loads(line)) for line in (count / "counted-1").read_text().splitlines())
    print(f"the exchange has {total} lines")
    assert total > 150
    lines = list(range(3, total, 17))
    model = Doomed(SIZE, window=SCHEME.window, deaths=deaths, lines=lines)
    batches = (PACE + 6 * SCHEME.window) * (len(lines) + 4)
    result, left = train_counting(model, batches, tmp_path / "killed", codec=codec, workers=3)
    assert left
    assert result.summary["lost_workers"] == len(lines)


def test_workers_may_be_killed_at_any_moment_with_a_codec_whose_bytes_differ(tmp_path):
    assassin = Assassin(seed=3, kills=8, every=9, delay=0.004)
    model = Counting(SIZE, sleep=0.001)
    result, _ = train_counting(model, 400, tmp_path / "run", assassin, codec=pg.Threshold(7.0), workers=3)
    assert assassin.done()
    assert result.summary["lost_workers"] == assassin.lost == 8


class Balance:
    """A callback that looks at every checkpoint: what has reached the center and what is left over are all steps that count."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.seen: list[int] = []

    def __call__(self, event: pg.Event) -> None:
        if event.kind != "checkpoint":
            return
        found = checkpoint.load(self.out / event.data["path"])
        left = {name: tensor for name, tensor in found.tensors.items() if name.startswith("residual.")}
        steps = found.numbers["center"]["counts"]["steps"]
        ledger = found.numbers["center"]["ledger"]
        if len(left) == sum(last > 0 for last in ledger):  # else some have ended, and taken what was left over with them
            assert torch.equal(found.tensors["value"] + sum(left.values()), torch.full((SIZE,), float(steps))), event
            self.seen.append(len(left))


def count_over_a_network(batches: int, run: pg.Run, **engine: Any) -> pg.Result:
    x = torch.zeros(batches * BATCH, 1)
    return pg.train(
        Counting(SIZE, sleep=0.004),
        (x, x),
        loss=minus,
        optimizer="sgd:lr=1",
        scheme=SCHEME,
        codec=pg.TopK(0.3),
        engine=pg.Network(workers=2, here=2, threads=1, **engine),
        batch_size=BATCH,
        run=run,
    )


def left_behind(out: Path) -> list[Path]:
    return list(mapped_file.FAST.glob(f"paragrad-{endpoint.run_name(out, endpoint.read_token(out / endpoint.TOKEN))}-*"))


def check_repeated(out: Path, batches: int) -> None:
    """Every row counts once, and a replay repeats the run to the bit."""
    x = torch.zeros(batches * BATCH, 1)
    assert every_batch_once(out, batches)
    assert pg.replay(out, Counting(SIZE), (x, x), optimizer="sgd:lr=1", loss=minus).equal


@pytest.mark.parametrize("where", [{"shared": False}, {"shared": True}, {"shards": 3}], ids=["away", "beside", "shards"])
def test_what_workers_over_a_network_have_left_out_is_in_checkpoints_and_is_not_lost_with_them(where, tmp_path):
    out = tmp_path / "run"
    assassin, balance = Assassin(seed=5, kills=6, every=12, delay=0.004), Balance(out)
    result = count_over_a_network(500, pg.Run(out=out, callbacks=(assassin, balance), checkpoint_every=0.3), **where)
    assert assassin.done()
    assert result.summary["lost_workers"] == assassin.lost == 6
    check_repeated(out, 500)
    taken = [event.data["taken"] for event in read(out) if event.kind == "residual"]
    assert taken == [True] * len(taken)
    assert len(taken) >= 4
    assert balance.seen.count(2) >= 3
    assert not left_behind(out)


@pytest.mark.parametrize(
    ("stop", "also"), [(pg.Stop(seconds=0.4), ()), (pg.Stop(), (stop_after(41),))], ids=["seconds", "callback"]
)
def test_a_run_over_a_network_that_was_stopped_goes_on_with_what_its_workers_had_left_out(stop, also, tmp_path):
    out = tmp_path / "run"
    balance = Balance(out)
    count_over_a_network(300, pg.Run(out=out, callbacks=(balance, *also), stop=stop, checkpoint_every=None))
    assert balance.seen == [2]
    assert not left_behind(out), "what the checkpoint holds is left nowhere else"
    count_over_a_network(300, pg.Run(out=out, callbacks=(balance,), resume=True, checkpoint_every=0.2))
    assert balance.seen.count(2) >= 2
    assert [event.data["taken"] for event in read(out) if event.kind == "residual"] == [True, True]
    check_repeated(out, 300)
