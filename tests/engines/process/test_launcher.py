"""Workers that a launcher starts, of which the center knows no more than that: the laws of engines, and of fencing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import paragrad as pg
from paragrad.laws import engine as engine_laws
from paragrad.laws.trials import Trials
from paragrad.rundir.record import read
from paragrad.schemes.traits import name_of
from tests.conftest import Watch, every_batch_once, train
from tests.engines.process.subprocesses import Started, Subprocesses

SHORT = ("one worker is plain training", "a round is the large batch", "a workers exception reaches the caller")


def network(launcher: Subprocesses, **options: Any) -> pg.Network:
    return pg.Network(workers=2, here=2, threads=1, launcher=launcher, **options)


def test_workers_of_any_launcher_obey_the_laws_of_engines(tmp_path):
    engine = network(Subprocesses())
    laws = [law for law in engine_laws.LAWS if law.__name__.replace("_", " ") in SHORT]
    assert len(laws) == len(SHORT)
    for law in laws:
        law(Trials(engine, engine.alone(), tmp_path))


@pytest.mark.chaos
@pytest.mark.parametrize("shared", [True, False])
def test_all_laws_of_engines_hold(shared):
    assert len(pg.check_engine(network(Subprocesses(), shared=shared))) == len(engine_laws.LAWS)


# -- fencing ------------------------------------------------------------------------------------------------------------


@dataclass
class Undead(Started):
    """A worker that its scheduler takes for dead, while it lives."""

    declared: bool = False

    @property
    def exitcode(self) -> int | None:
        return -9 if self.declared else self.popen.poll()

    def is_alive(self) -> bool:
        return not self.declared and self.popen.poll() is None

    def kill(self) -> None:
        """Nothing happens: its node cannot be reached."""
        if not self.declared:
            self.popen.kill()

    def join(self) -> None:
        if not self.declared:
            self.popen.wait()


@dataclass(frozen=True)
class Forgetful(Subprocesses):
    """A scheduler that can be made to declare a worker dead."""

    exits: list[Any] = field(default_factory=list, compare=False)

    def start(self, task, on_exit):
        started = super().start(task, on_exit)
        undead = Undead(started.popen)
        self.started[-1] = undead
        self.exits.append(on_exit)
        return undead

    def declare_dead(self, number: int) -> None:
        self.started[number].declared = True
        self.exits[number]()

    def close(self) -> None:
        for started in self.started:
            started.popen.kill()
            started.popen.wait()


@pytest.mark.parametrize("scheme", [pg.AGN(window=2), pg.SyncSGD()], ids=name_of)
@pytest.mark.parametrize("shared", [True, False], ids=["mapped", "wire"])
def test_a_worker_taken_for_dead_and_alive_changes_nothing(scheme, shared, model, rows, tmp_path):
    launcher = Forgetful()
    watch = Watch(at=20, act=lambda watch, event: launcher.declare_dead(0))
    result = train(model, rows, tmp_path, watch, scheme=scheme, epochs=8, engine=network(launcher, shared=shared))
    assert result.stopped == "finished"
    assert every_batch_once(tmp_path, 8 * 50)
    assert [event.data["rank"] for event in read(tmp_path) if event.kind == "lost"] == [0]
    joined = [event.data["incarnation"] for event in read(tmp_path) if event.kind == "join" and event.data["worker"] == 0]
    assert joined == [0, 1]
    later = [event for event in read(tmp_path) if event.kind == "commit" and event.data["worker"] == 0]
    numbers = [event.data["incarnation"] for event in later]
    assert numbers == sorted(numbers), "the old worker committed after the new one had joined"
    assert len(launcher.started) == 3
    wait_for_end(launcher.started[0])
    assert "took this worker for dead" in (tmp_path / "logs" / "worker-0.log").read_text()
    if scheme == pg.SyncSGD():
        whole = train(model, rows, tmp_path / "whole", scheme=scheme, epochs=8, engine=pg.Local(workers=2, threads=1))
        for mine, other in zip(result.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(mine, other)


def wait_for_end(started: Started) -> None:
    until = time.monotonic() + 20
    while started.popen.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert started.popen.poll() == 0, "a fenced worker ends by itself, without an error"


def test_a_lost_node_is_not_counted_as_the_workers_fault(model, rows, tmp_path):
    launcher = Subprocesses()
    lost: list[int] = []

    def lose(event: pg.Event) -> None:
        if event.kind == "worker" and event.data["rank"] == 0 and len(lost) < 4:
            lost.append(event.data["incarnation"])
            started = [one for one in launcher.started if one.lost is None][0 if len(lost) == 1 else -1]
            started.lost = "its node is gone"
            started.popen.kill()

    result = train(model, rows, tmp_path, lose, scheme=pg.AGN(window=2), engine=network(launcher, replace_after=60.0))
    assert result.stopped == "finished"
    assert every_batch_once(tmp_path, 4 * 50)
    reasons = [event.data["reason"] for event in read(tmp_path) if event.kind == "lost"]
    assert reasons == ["was lost (its node is gone)"] * 4


def test_a_payload_is_gone_with_the_run(model, rows, tmp_path):
    train(model, rows, tmp_path, scheme=pg.AGN(window=5), epochs=1, engine=network(Subprocesses()))
    assert not (tmp_path / "job.payload").exists()


def test_a_worker_that_was_not_started_here_is_rejected(tmp_path: Path) -> None:
    from paragrad.engines.transport.message import Malformed
    from tests.engines.net.intruder import Intruder
    from tests.engines.net.victim import Scene, Task

    task = Task(pg.AGN(window=2), workers=2, batches=20, counting=100)
    with Scene(task, tmp_path / "scene") as scene:
        scene.serve()
        scene.endpoint()
        for number in ([0, 0], [7, 0], "0", [0], [0, "x"]):
            with pytest.raises(Malformed, match="was not started by this center"):
                Intruder(scene.out, task).join(number=number)
