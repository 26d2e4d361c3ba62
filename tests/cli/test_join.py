"""``paragrad join`` where a batch system starts it: beside its center, with signals of its own, on a file system that lags."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paragrad.cli import train
from paragrad.cli.main import app
from paragrad.cli.train import gather
from paragrad.config.options import read_config
from paragrad.engines.process.devices import usable_cores
from paragrad.engines.transport.endpoint import FILE, Endpoint
from paragrad.engines.transport.message import TransportError
from paragrad.join import _cores_of_a_task, _is_directory, _job
from paragrad.rundir.record import read

RUN = 'data = "digits"\nmodel = "mlp:8"\nscheme = "agn:window=5"\nepochs = 1000000\n'
COMMAND = [sys.executable, "-m", "paragrad"]


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command of paragrad's, in the working directory; killed at the end if it is not over by then."""
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def commits(run: str, worker: int) -> int:
    record = Path(run, "record.jsonl")
    return sum(e.kind == "commit" and e.data["worker"] == worker for e in read(record)) if record.exists() else 0


def wait_for_commits(run: str, worker: int, *processes: subprocess.Popen[str]) -> None:
    before = commits(run, worker)
    until = time.monotonic() + 120
    while commits(run, worker) <= before:
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.1)


def test_signals_of_a_batch_system_reach_a_worker_well_and_its_center_goes_on() -> None:
    Path("run.toml").write_text(RUN)
    # The name has no slash, and is none of a directory yet: a worker that is started first waits for it all the same.
    with started("join", "night") as worker, started("serve", "run.toml", "--out", "night", "--workers", "1", "-q") as center:
        wait_for_commits("night", 0, worker, center)
        worker.send_signal(signal.SIGUSR1)
        wait_for_commits("night", 0, worker, center)
        worker.send_signal(signal.SIGTERM)
        worker.send_signal(signal.SIGTERM)
        said = worker.communicate(timeout=60)[0]
        assert worker.returncode == 0, said
        assert "This worker has left; the others go on without it." in said
        assert "Traceback" not in said
        with started("join", "night") as other:
            wait_for_commits("night", 0, other, center)
            center.send_signal(signal.SIGTERM)
            assert center.wait(timeout=60) == 128 + signal.SIGTERM
            assert "The run was stopped at its center." in other.communicate(timeout=60)[0]
            assert other.returncode == 0


def test_usr1_ends_no_center_however_early_it_comes() -> None:
    Path("run.toml").write_text(RUN)
    with started("serve", "run.toml", "--out", "night", "--workers", "1", "--here", "1", "-q") as center:
        while not is_deaf(center.pid):
            assert center.poll() is None, center.communicate()[0]
        while not list(Path("night").glob("checkpoints/*")):
            center.send_signal(signal.SIGUSR1)
            time.sleep(0.1)
            assert center.poll() is None, center.communicate()[0]
        wait_for_commits("night", 0, center)
        center.send_signal(signal.SIGTERM)
        assert "has a checkpoint" in center.communicate(timeout=60)[0]


def is_deaf(pid: int) -> bool:
    """Whether SIGUSR1 would do something else to a process than end it."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool((int(status["SigIgn"], 16) | int(status["SigCgt"], 16)) >> (signal.SIGUSR1 - 1) & 1)


def test_a_worker_that_waits_for_its_center_leaves_on_sigterm_too() -> None:
    with started("join", "nowhere") as worker:
        assert worker.stdout is not None
        assert "This worker waits for it." in worker.stdout.readline()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=60) == 0
        assert worker.stdout.read() == "This worker has left; the others go on without it.\n"


def test_a_run_that_listened_elsewhere_goes_on_from_its_own_run_toml(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN + 'engine = "network:address=0.0.0.0:0,workers=3"\n')
    settings, going_on = gather(None, str(tmp_path), {})
    assert going_on is True
    assert settings["engine"] == "network:address=0.0.0.0:0,workers=3"


@pytest.mark.parametrize(("epochs", "done"), [(20, True), (19, True), (21, False)])
def test_a_center_of_a_run_that_is_done_waits_for_nobody(epochs: int, done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(train, "carry_out", lambda *given, **options: served.append(given))
    Path("night").mkdir()
    Path("night/summary.json").write_text(json.dumps({"stopped": "finished", "epochs": 20}))
    Path("run.toml").write_text(RUN.replace("1000000", str(epochs)))
    answered = CliRunner().invoke(app, ["serve", "run.toml", "--out", "night", "--resume", "auto"])
    assert answered.exit_code == 0, answered.output
    assert bool(served) is not done
    assert ("The run in night is done" in answered.output) is done
    assert Path("night/summary.json").exists() is done, "workers that find no center take it for the end"


@pytest.mark.parametrize(
    ("where", "directory"), [("night", True), ("runs/a:7", True), ("node7:7000", False), ("[::1]:7", False)]
)
def test_a_name_without_a_port_is_a_directory(where: str, directory: bool) -> None:
    assert _is_directory(where) is directory


def test_an_endpoint_that_vanishes_while_it_is_looked_at_is_looked_for_again(tmp_path: Path) -> None:
    (tmp_path / FILE).symlink_to(tmp_path / "gone")
    with pytest.raises(TransportError, match="cannot be read now"):
        Endpoint.read(tmp_path)


@pytest.mark.parametrize(("said", "threads"), [("1", 1), ("100000", usable_cores()), ("", None), ("0", None)])
def test_a_worker_has_the_cores_of_its_task(said: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", said)
    assert _cores_of_a_task() == threads


def test_a_worker_needs_no_file_that_only_the_center_validates_on(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    lines = [f"{a:.4f},{b:.4f},{row % 2}" for row, (a, b) in enumerate(draw.normal(size=(40, 2)))]
    for name, mine in (("train.csv", lines[:30]), ("test.csv", lines[30:])):
        (tmp_path / name).write_text("\n".join(["a,b,label", *mine]))
    flags = ["--model", "linear", "--engine", "vector", "--workers", "2", "--batch-size", "5", "--quiet", "--out", "run"]
    done = CliRunner().invoke(app, ["train", "--data", "train.csv", "--validation", "test.csv", *flags])
    assert done.exit_code == 0, done.output
    (tmp_path / "test.csv").unlink()
    about = {"settings": {"partition": "auto", **read_config(Path("run") / "run.toml")}, "workers": 2}
    job = _job(about, None, None, None, None, None, None, None, ())
    assert (len(job.train), job.plan.rows) == (30, 30)
