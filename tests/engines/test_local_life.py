"""How a run begins and ends: scripts without a guard, lambdas, notebooks, signals, a parent that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.data.plan import Plan
from paragrad.engines.process.signals import ECHO
from paragrad.rundir.record import read
from tests.conftest import Watch, every_batch_once, train

HEAD = """
import os, sys, torch, paragrad as pg
from torch import nn
torch.manual_seed(0)
x = torch.randn(400, 8)
y = (x[:, 0] > 0).long()
"""
LONG = (
    HEAD
    + """
import time
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x)
try:
    r = pg.train(Slow(8, 2), (x, y), scheme=pg.AGN(window=2), engine=pg.Local(workers=2), optimizer="sgd:lr=0.1",
                 batch_size=8, epochs=400, run=pg.Run(out="run", validate_every=None))
except pg.Interrupted as stop:
    print("INTERRUPTED", stop)
    sys.exit(1)
"""
)


def run_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=60)


def start_long(folder: Path, script: str = LONG) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: commits(folder) > 3, process)
    return process


def commits(folder: Path) -> int:
    record = folder / "run" / "record.jsonl"
    return sum(event.kind == "commit" for event in read(record)) if record.exists() else 0


def pids(folder: Path) -> list[int]:
    return [event.data["pid"] for event in read(folder / "run" / "record.jsonl") if event.kind == "worker"]


def wait_for(condition, process=None, seconds: float = 40.0) -> None:
    """Poll for something that another process does."""
    end = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the process ended early: {process.communicate()}")
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def in_dev_shm() -> set[str]:
    """What lies there, but for the memories of centers over a network, which other tests may have at the same time."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("paragrad-")}


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_script_needs_no_main_guard_and_may_use_its_own_classes_and_lambdas(tmp_path):
    done = run_script(
        HEAD
        + """
print("top level")
class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 2)
    def forward(self, x):
        return scale(self.inner(x))
scale = lambda out: out * float(pg.AGN(window=2).window)
r = pg.train(Mine(), (x, y), loss=lambda out, target: nn.functional.cross_entropy(out, target),
             optimizer=lambda params: torch.optim.SGD(params, lr=0.1), metrics={"half": lambda out, target: 0.5},
             holdout=0.25, scheme=pg.AGN(window=2), engine=pg.Local(workers=2), epochs=2)
print("accuracy", r.accuracy, r.summary["metrics"])
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("top level") == 1
    assert "'half': 0.5" in done.stdout


def test_a_notebook_cell_may_define_the_model(tmp_path):
    cells = [
        HEAD,
        "class Mine(nn.Linear):\n    pass\n",
        "r = pg.train(Mine(8, 2), (x, y), epochs=2)\nprint('DONE', r.stopped)\n",
    ]
    driver = (
        "import types, sys\n"
        "main = types.ModuleType('__main__')\nsys.modules['__main__'] = main\n"
        f"for number, cell in enumerate({cells!r}):\n"
        "    exec(compile(cell, f'<ipython-input-{number}>', 'exec'), main.__dict__)\n"
    )
    done = run_script(driver, tmp_path)
    assert "DONE finished" in done.stdout, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_stops_cleanly_with_a_checkpoint_and_the_run_goes_on(number, tmp_path):
    process = start_long(tmp_path)
    for _ in range(2):  # to all processes, and again at once, as a terminal and what it runs may do together
        os.killpg(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1, err
    assert "INTERRUPTED" in out
    assert "To go on: call pg.train again with run=pg.Run(out='run', resume=True)\n" in out
    assert not [pid for pid in pids(tmp_path) if alive(pid)]
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    before = commits(tmp_path)
    again = run_script(LONG.replace('out="run"', 'out="run", resume=True, stop=pg.Stop(seconds=1)'), tmp_path)
    assert again.returncode == 0, again.stderr
    assert commits(tmp_path) > before


@pytest.mark.parametrize("when", ["commit", "checkpoint"])
def test_a_second_interrupt_ends_at_once(when, tmp_path):
    """In the middle of the training, and while the checkpoint of the first is written."""
    slow = f'callbacks=(lambda event: event.kind == "{when}" and os.path.exists("first") and time.sleep(60),), validate_every'
    process = start_long(tmp_path, LONG.replace("validate_every", slow))
    workers = pids(tmp_path)
    (tmp_path / "first").touch()
    if when == "commit":
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(ECHO + 0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1, err
    assert "INTERRUPTED The run was ended at once" in out
    assert list(read(tmp_path / "run"))[-1].data["reason"] == "ended at once"
    wait_for(lambda: not any(map(alive, workers)))
    assert not any(map(alive, workers))


def test_sigusr1_writes_a_checkpoint_and_training_goes_on(tmp_path):
    process = start_long(tmp_path)
    process.send_signal(signal.SIGUSR1)
    folder = tmp_path / "run" / "checkpoints"
    wait_for(lambda: folder.exists() and any(path.name[0] != "." for path in folder.iterdir()), process)
    before = commits(tmp_path)
    wait_for(lambda: commits(tmp_path) > before + 5, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 1


def test_a_process_that_ends_waits_for_no_child_that_was_left(tmp_path):
    script = """
import time
from paragrad.engines.process import forkserver
for _ in range(2):
    forkserver.start(time.sleep, 600, name="left")
print("ends")
"""
    assert run_script(script, tmp_path).stdout == "ends\n"


def test_a_killed_parent_leaves_no_orphan_and_nothing_in_dev_shm(tmp_path):
    before = in_dev_shm()
    process = start_long(tmp_path)
    workers = pids(tmp_path)
    assert all(map(alive, workers))
    process.kill()
    process.communicate(timeout=30)
    wait_for(lambda: not any(map(alive, workers)), seconds=10)
    assert not any(map(alive, workers))
    assert in_dev_shm() <= before


def test_all_workers_begin_together(model, rows, tmp_path):
    watch = Watch()
    result = train(model, rows, tmp_path / "run", watch, scheme=pg.AGN(window=2), epochs=8)
    order = [event.kind for event in watch.events if event.kind in ("worker", "go", "commit")]
    assert order[:4] == ["worker", "worker", "worker", "go"]
    assert result.staleness.max < result.summary["commits"] / 3
    assert every_batch_once(result.directory, 50 * 8)


def test_one_worker_is_plain_training_across_processes(model, rows, tmp_path):
    x, y = rows
    result = train(model.double(), (x.double(), y), tmp_path / "run", scheme=pg.Downpour(window=3), engine=pg.Local(workers=1))
    plan = Plan(rows=400, batch_size=8, epochs=4, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for position in range(plan.positions):
        chosen = torch.from_numpy(plan.rows_of(position))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.double()[chosen]), y[chosen]).backward()
        optimizer.step()
    for mine, theirs in zip(result.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12, rtol=0)


def test_the_summary_and_the_model_file_say_what_the_issue_asks(model, rows, tmp_path):
    result = train(model, rows, tmp_path / "run", holdout=0.2, scheme=pg.AEASGD(window=2))
    summary = json.loads((result.directory / "summary.json").read_text())
    assert set(summary) >= {
        *("scheme", "engine", "workers", "epochs", "batch_size", "parameters", "steps", "commits", "samples", "seconds"),
        *("samples_per_second", "train_loss", "test_loss", "test_accuracy", "staleness", "refused_commits"),
        *("dropped_commits", "lost_workers", "seed", "versions"),
    }
    assert set(summary["staleness"]) == {"mean", "max", "histogram"}
    assert sum(summary["staleness"]["histogram"].values()) == summary["commits"]
    assert summary["samples"] == 320 * 4
    assert summary["steps"] == 40 * 4
    from safetensors.torch import load_file

    saved = load_file(result.directory / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in result.model.state_dict().items())
