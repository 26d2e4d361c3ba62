"""Real processes killed while they code a commit: what they had left out is not lost with them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

import paragrad as pg
from tests.conftest import every_batch_once
from tests.engines.kills import BATCH, Assassin
from tests.engines.victim import PACE, Counting, Doomed, minus

SIZE = 999
SCHEME = pg.Downpour(window=2)


def train_counting(model: Counting, batches: int, out: Path, *callbacks, codec: pg.Codec, workers: int) -> pg.Result:
    """Each step adds one to every weight: what has reached the center and what is left over are all steps, to the bit."""
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
    assert any(bool(residual.any()) for residual in left)
    assert torch.equal(kept["value"] + sum(left), torch.full((SIZE,), float(batches)))
    return result


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
    result = train_counting(model, (PACE + 6 * SCHEME.window) * (len(lines) + 4), tmp_path / "killed", codec=codec, workers=3)
    assert result.summary["lost_workers"] == len(lines)


def test_workers_may_be_killed_at_any_moment_with_a_codec_whose_bytes_differ(tmp_path):
    assassin = Assassin(seed=3, kills=8, every=9, delay=0.004)
    model = Counting(SIZE, sleep=0.001)
    result = train_counting(model, 400, tmp_path / "run", assassin, codec=pg.Threshold(7.0), workers=3)
    assert assassin.done()
    assert result.summary["lost_workers"] == assassin.lost == 8
