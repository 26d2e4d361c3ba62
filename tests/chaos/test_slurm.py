"""The scripts of docs/slurm.md, as they stand there, on a Slurm of one machine: they train, come back from a requeue and
from the walltime, and workers of a job array come and go.

Run with ``make chaos``; ``make slurm`` installs what it needs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paragrad as pg
from paragrad.cli.main import app
from paragrad.rundir.record import batches_used, effective, read
from tests.chaos import slurm as one_machine
from tests.chaos.slurm import Slurm, eventually

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(bool(one_machine.missing()), reason=str(one_machine.missing()))]

PAGE = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text()
BATCHES = 45
"""Of an epoch: 1,437 rows of the digits, 32 at a time."""
ENDLESS = 1_000_000
"""Epochs, until something has happened that the test waits for."""
PATIENCE = 300.0
"""Seconds for what a machine with nothing else to do has done in ten."""


def scripts() -> dict[str, str]:
    """Those on the page, by their jobs' names."""
    found = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    return {re.search(r"--job-name=(\w+)", script)[1]: script for script in found}  # type: ignore[index]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with one_machine.running() as started:
        yield started


class Upload:
    """A user's folder, with the page's run.toml and scripts in it."""

    def __init__(self, slurm: Slurm, folder: Path, epochs: int | None = None) -> None:
        self.slurm, self.folder = slurm, folder
        (toml,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
        (folder / "run.toml").write_text(toml if epochs is None else toml.replace("epochs = 20", f"epochs = {epochs}"))
        for name, script in scripts().items():
            (folder / f"{name}.sh").write_text(script)

    def submit(self, name: str, *options: str) -> str:
        return self.slurm.submit(self.folder / f"{name}.sh", *options)

    def events(self, run: str) -> list[pg.Event]:
        record = self.folder / "runs" / run / "record.jsonl"
        return list(read(record)) if record.exists() else []

    def commits(self, run: str) -> int:
        return sum(event.kind == "commit" for event in self.events(run))

    def summary(self, run: str) -> dict[str, Any]:
        return json.loads((self.folder / "runs" / run / "summary.json").read_text())  # type: ignore[no-any-return]

    def output(self, job: str = "*") -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(f"slurm-{job}.out")))

    def bound(self, run: str) -> int:
        """Let a run that goes on later end some epochs from now; returns after how many in all."""
        epochs = max(batches_used(self.events(run))) // BATCHES + 60
        file = self.folder / "run.toml"
        file.write_text(re.sub(r"epochs = \d+", f"epochs = {epochs}", file.read_text()))
        return epochs

    def wait_for_commits(self, run: str, count: int) -> None:
        eventually(lambda: self.commits(run) >= count, PATIENCE, self.output)

    def wait_for_end(self, job: str, state: str = "COMPLETED") -> None:
        eventually(lambda: self.slurm.ended(job), PATIENCE, self.output)
        assert self.slurm.state(job) == state, self.output()


@pytest.mark.parametrize("options", [(), ("--nodes=2", "--ntasks-per-node=1")], ids=["one node", "two nodes"])
def test_the_smallest_script_trains_like_the_local_engine(options, slurm, tmp_path):
    desk = Upload(slurm, tmp_path)
    job = desk.submit("digits", *options)
    desk.wait_for_end(job)
    accuracy = desk.summary("digits")["test_accuracy"]
    (tmp_path / "local").mkdir()
    done = CliRunner().invoke(app, ["train", "run.toml", "--workers", "2", "--out", "local/run"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    alone = json.loads(Path("local/run/summary.json").read_text())["test_accuracy"]
    print(f"digits, 2 workers on {slurm.facts(job)['NodeList']}, 20 epochs: accuracy {accuracy:.4f}; locally {alone:.4f}")
    assert abs(accuracy - alone) < 0.04
    assert batches_used(desk.events("digits")) == Counter(range(20 * BATCHES))
    assert "Traceback" not in desk.output()
    assert "srun: error" not in desk.output(), desk.output()


def test_a_script_that_fails_ends_its_job_at_once_and_with_its_workers(slurm, tmp_path):
    desk = Upload(slurm, tmp_path)
    (tmp_path / "run.toml").write_text('data = "digits"\nmodell = "mlp"\n')
    job = desk.submit("digits")
    desk.wait_for_end(job, "FAILED")
    assert "modell" in desk.output()
    assert slurm.facts(job)["ExitCode"] == "2:0"


def test_a_center_that_is_a_step_writes_a_checkpoint_when_the_whole_job_is_signalled(slurm, tmp_path):
    desk = Upload(slurm, tmp_path, epochs=ENDLESS)
    job = desk.submit("step")
    desk.wait_for_commits("step", 20)
    checkpoints = tmp_path / "runs" / "step" / "checkpoints"
    before = set(checkpoints.glob("*"))
    slurm("scancel", "--signal=USR1", job)
    eventually(lambda: bool(set(checkpoints.glob("*")) - before), PATIENCE, desk.output)
    desk.wait_for_commits("step", desk.commits("step") + 20)
    assert slurm.state(job) == "RUNNING"
    slurm("scancel", job)
    desk.wait_for_end(job, "CANCELLED")
    assert "has a checkpoint" in desk.output()
    assert set(batches_used(desk.events("step")).values()) == {1}


def test_a_job_that_nears_its_walltime_is_requeued_and_goes_on(slurm, tmp_path):
    desk = Upload(slurm, tmp_path, epochs=ENDLESS)
    job = desk.submit("night")
    desk.wait_for_commits("night", 200)
    slurm.limit(job, minutes=2)  # --signal=B:USR1@120 is due
    eventually(lambda: (slurm.facts(job)["Restarts"], slurm.state(job)) == ("1", "PENDING"), PATIENCE, desk.output)
    assert not (tmp_path / "runs" / "night" / "summary.json").exists()
    assert list((tmp_path / "runs" / "night" / "checkpoints").iterdir())
    before, epochs = max(event.data["clock"] for event in effective(desk.events("night"))), desk.bound("night")
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    desk.wait_for_end(job)
    events = desk.events("night")
    assert [event.data["clock"] for event in events if event.kind == "resume"] == [before]
    assert batches_used(events) == Counter(range(epochs * BATCHES))
    assert desk.summary("night")["samples"] == epochs * 1437
    desk.wait_for_end(desk.submit("night"))  # handed in once too often
    assert "The run in runs/night is done" in desk.output()
    print(f"requeued after {before} updates, went on to {epochs * BATCHES // 5}, rows wrong 0")


def test_a_chain_of_jobs_writes_checkpoints_on_usr1_and_goes_on_after_the_walltime(slurm, tmp_path):
    desk = Upload(slurm, tmp_path, epochs=ENDLESS)
    with (tmp_path / "run.toml").open("a") as settings:
        settings.write("checkpoint_every = 86400\n")
    first, second = desk.submit("chain"), desk.submit("chain")
    desk.wait_for_commits("chain", 50)
    slurm.limit(first, minutes=2)
    checkpoints = tmp_path / "runs" / "chain" / "checkpoints"
    eventually(lambda: checkpoints.exists() and any(checkpoints.iterdir()), PATIENCE, desk.output)
    desk.wait_for_commits("chain", desk.commits("chain") + 50)
    assert slurm.state(first) == "RUNNING", "SIGUSR1 was for a checkpoint, and the center goes on"
    slurm.limit(first, minutes=0)
    desk.wait_for_end(first, "TIMEOUT")
    assert "has a checkpoint" in desk.output(first)
    before = max(event.data["clock"] for event in effective(desk.events("chain")))
    eventually(lambda: any(event.kind == "resume" for event in desk.events("chain")), PATIENCE, desk.output)
    (resumed,) = [event.data["clock"] for event in desk.events("chain") if event.kind == "resume"]
    assert resumed == before, "nothing is lost between the walltime and the next job"
    desk.wait_for_commits("chain", desk.commits("chain") + 50)
    slurm("scancel", second)
    desk.wait_for_end(second, "CANCELLED")
    used = batches_used(desk.events("chain"))
    assert set(used.values()) == {1}, "no row twice"
    print(f"ended by the walltime after {before} updates, went on from there to {len(used) // 5}, rows twice 0")


def test_workers_of_a_job_array_come_and_go_and_so_does_their_center(slurm, tmp_path):
    desk = Upload(slurm, tmp_path, epochs=ENDLESS)

    def lives() -> Counter[tuple[int, int]]:
        return Counter((event.data["worker"], event.data["incarnation"]) for event in effective(desk.events("array")))

    workers = desk.submit("workers")  # before their center: they wait for it
    eventually(lambda: desk.output(f"{workers}_*").count("waits for it") == 3, PATIENCE, desk.output)
    center = desk.submit("center")
    eventually(lambda: len(lives()) == 3, PATIENCE, desk.output)
    slurm("scancel", f"{workers}_1")
    desk.wait_for_end(f"{workers}_1", "CANCELLED")
    assert "This worker has left; the others go on without it." in desk.output(f"{workers}_1")
    late = desk.submit("workers", "--array=7")
    eventually(lambda: len(lives()) == 4, PATIENCE, desk.output)
    assert sum(incarnation == 1 for _, incarnation in lives()) == 1, "on the place of the one that left"
    slurm("scontrol", "requeue", center)
    eventually(lambda: slurm.state(center) == "PENDING", PATIENCE, desk.output)
    epochs = desk.bound("array")
    for job in (center, f"{workers}_2", f"{workers}_3", f"{late}_7"):
        desk.wait_for_end(job)
    assert "Traceback" not in desk.output()
    assert batches_used(desk.events("array")) == Counter(range(epochs * BATCHES))
    print(f"array: one worker cancelled, one late, the center requeued; commits of each {dict(lives())}, rows wrong 0")
