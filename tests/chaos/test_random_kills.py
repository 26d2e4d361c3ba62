"""Seventy workers killed and ten stopped at random moments; a trainer killed ten times in a row; every line of the exchange.

Run with ``make chaos``; ``-s`` shows the figures.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paragrad as pg
from paragrad.rundir.record import batches_used, effective, read
from paragrad.schemes.traits import name_of
from tests.engines.exchange.kills import Assassin, gaps, train_counting
from tests.engines.exchange.test_kills import SPARE, exchange_lines, kill_at
from tests.engines.exchange.victim import Counting

pytestmark = pytest.mark.chaos

SIZE = 1_000_000
STEP = 0.025
"""Seconds a step sleeps: what decides the rhythm is then not who else uses the cores."""


@pytest.mark.parametrize(
    ("scheme", "kills", "stops"),
    [
        (pg.AGN(window=5), 25, 4),
        (pg.AEASGD(window=5), 25, 2),
        (pg.SyncSGD(), 10, 2),
        (pg.DiLoCo(window=5), 10, 2),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_random_kills_lose_no_row_tear_nothing_and_cost_the_others_nothing(scheme, kills, stops, tmp_path):
    every = 12 if scheme.quorum(4) == 1 else 12 * 5 // scheme.window
    assassin = Assassin(seed=kills + stops, kills=kills, stops=stops, every=every, delay=1.5 * scheme.window * STEP)
    engine = pg.Local(workers=4, replace_after=1.0)
    batches = scheme.window * every * (kills + stops + 4) // 4 * 4
    result = train_counting(Counting(SIZE, sleep=STEP), batches, tmp_path / "run", assassin, scheme=scheme, engine=engine)
    assert assassin.done()
    assert result.summary["lost_workers"] == assassin.lost == assassin.deaths
    found = gaps(result.directory, spare=assassin.stopped)
    ratio = max(longest / median for median, longest in found.values())
    print(
        f"{name_of(scheme)}: seed {assassin.seed}, {kills} kills, {stops} stops, {result.summary['commits']} commits in "
        f"{result.summary['seconds']:.1f} s, torn 0, rows wrong 0, largest gap {ratio:.2f} of the median"
    )
    if scheme.quorum(4) == 1:
        assert ratio <= 3, f"a survivor waited: (median, longest) gap of each worker {found}"


@pytest.mark.parametrize(
    "scheme", [pg.SyncSGD(), pg.AEASGD(window=2), pg.AEASGD(window=2, atomic=False), pg.DiLoCo(window=2)], ids=repr
)
def test_a_worker_may_be_killed_at_every_line_of_every_kind_of_exchange(scheme, tmp_path):
    total = exchange_lines(scheme, tmp_path / "count")
    lines = list(range(1, total + SPARE))
    kill_at(lines, scheme, tmp_path / "kill")
    print(f"{scheme!r}: killed at each of {len(lines)} lines, torn 0, rows wrong 0")


SCRIPT = """
import torch, paragrad as pg
from torch import nn
import time

class Slow(nn.Sequential):
    def forward(self, x):
        if self.training:
            time.sleep(0.01)
        return super().forward(x)

torch.manual_seed(0)
x = torch.randn(1600, 8)
y = (x[:, 0] > 0).long()
model = Slow(nn.Linear(8, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 2))
pg.train(model, (x, y), scheme=pg.SyncSGD(), engine=pg.Local(workers=2), optimizer="adam:lr=0.01", batch_size=8, epochs=10,
         run=pg.Run(out="run", resume="auto", checkpoint_every=0.1, validate_every=None))
"""
BATCHES = 200 * 10


def start(folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(SCRIPT)
    with (folder / "output").open("ab") as output:
        return subprocess.Popen([sys.executable, "script.py"], cwd=folder, stdout=output, stderr=output)


def commits(folder: Path) -> int:
    record = folder / "run" / "record.jsonl"
    return sum(event.kind == "commit" for event in read(record)) if record.exists() else 0


def test_a_trainer_killed_ten_times_in_a_row_ends_bit_equal_to_one_that_was_not(tmp_path):
    seed = 10
    rng = random.Random(seed)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(whole).wait(timeout=300) == 0, (whole / "output").read_text()
    for _ in range(10):
        before = commits(broken)
        process = start(broken)
        # Two in three are killed at work, the others at any moment of their start.
        if rng.random() < 0.67:
            while commits(broken) == before:
                assert process.poll() is None, (broken / "output").read_text()
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.8))
        else:
            time.sleep(rng.uniform(0, 5))
        assert process.poll() is None, "the run was over before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(broken).wait(timeout=300) == 0, (broken / "output").read_text()
    events = list(read(broken / "run" / "record.jsonl"))
    used = batches_used(events)
    assert set(used.values()) == {1}
    assert len(used) == BATCHES
    clocks = [event.data["clock"] for event in effective(events)]
    assert clocks == sorted([*range(1, BATCHES // 2 + 1)] * 2)
    resumes = [event.data["clock"] for event in events if event.kind == "resume"]
    mine, theirs = (load_file(folder / "run" / "model.safetensors") for folder in (broken, whole))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    print(f"seed {seed}: killed 10 times, resumed at updates {resumes} of {BATCHES // 2}, rows wrong 0, bit-equal")
