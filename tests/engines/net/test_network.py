"""Workers over the network train as those of one machine do, however they come and go."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.engines.transport import endpoint
from paragrad.engines.transport.endpoint import TOKEN
from paragrad.engines.transport.flight import SCHEMA, _write_vectors
from paragrad.engines.transport.message import encode
from paragrad.errors import WorkerError
from paragrad.rundir.record import read
from paragrad.schemes.traits import name_of
from paragrad.types import COMMIT, Commit
from tests.conftest import Watch, every_batch_once, kill, train
from tests.engines.net.intruder import Intruder, piece
from tests.engines.net.kills import check_sound, same_bits
from tests.engines.net.victim import Scene, Task, command

KINDS = [
    Task(pg.AGN(window=5), optimizer="adam:lr=0.01"),
    Task(pg.AEASGD(window=5), optimizer="sgd:lr=0.1,momentum=0.9"),
    Task(pg.ADAG(window=2), optimizer="sgd:lr=0.1"),
    Task(pg.GEM(window=2), optimizer="sgd:lr=0.1"),
    Task(pg.SoftSync(), optimizer="adam:lr=0.01"),
    Task(pg.DiLoCo(window=5), optimizer="adam:lr=0.01"),
]
"""By movement, own answers, what the center remembers, a fresh pull, gradients without waiting, slots of the center; all of
them with batch norm, that is with buffers."""


def test_a_run_that_is_over_leaves_no_memory_behind(model, rows, tmp_path):
    """Flight keeps a server for good: with what hangs on it, every run of a notebook would cost its center's memory."""
    for name in ("first", "second"):
        train(copy.deepcopy(model), rows, tmp_path / name, engine=pg.Network(workers=2, here=2), epochs=1)
    gc.collect()
    files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [file for file in files if ".center" in file]


@pytest.mark.parametrize(
    ("shared", "task"), list(enumerate(KINDS)), ids=lambda value: name_of(value.scheme) if isinstance(value, Task) else ""
)
def test_one_worker_over_the_network_ends_on_the_bits_of_one_on_this_machine(shared, task, tmp_path):
    engine = pg.Network(workers=1, here=1, shared=bool(shared % 2), threads=1)
    far = task.train(tmp_path / "far", engine)
    near = task.train(tmp_path / "near", pg.Local(workers=1, threads=1))
    assert same_bits(far.directory, near.directory)
    assert every_batch_once(far.directory, task.batches)
    assert far.summary["commits"] == near.summary["commits"]
    assert far.summary["steps"] == near.summary["steps"] == task.batches


@pytest.mark.parametrize("shared", [False, True])
def test_synchronous_workers_are_one_worker_with_a_large_batch(shared, tmp_path):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(160, 5, generator=generator, dtype=torch.float64)
    y = (x[:, :1] > 0).double()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    options: dict[str, Any] = {"loss": "mse", "optimizer": "adam:lr=0.01", "scheme": pg.SyncSGD(), "epochs": 2, "seed": 5}
    two = pg.train(
        model,
        (x, y),
        engine=pg.Network(workers=2, here=2, shared=shared),
        batch_size=8,
        run=pg.Run(out=tmp_path / "two"),
        **options,
    )
    one = pg.train(model, (x, y), engine=pg.Local(workers=1), batch_size=16, run=pg.Run(out=tmp_path / "one"), **options)
    for mine, theirs in zip(two.model.parameters(), one.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-10)
    assert every_batch_once(two.directory, 40)


def test_a_workers_exception_reaches_the_caller(tmp_path):
    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and bool((x == 7).any()):
                raise ValueError("a seven")
            return super().forward(x)

    x = torch.zeros(80, 2)
    x[50] = 7
    with pytest.raises(WorkerError, match="a seven"):
        pg.train(
            Fails(2, 1),
            (x, x[:, :1]),
            loss="mse",
            engine=pg.Network(workers=1, here=1),
            batch_size=8,
            run=pg.Run(out=tmp_path / "run"),
        )


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    task = Task(pg.SyncSGD(), optimizer="adam:lr=0.01")
    engine = pg.Network(workers=2, here=2, threads=1)
    stop = Watch()
    stop.act, stop.at = None, 0

    def callback(event: pg.Event) -> bool:
        stop(event)
        return stop.commits >= 40

    first = task.train(tmp_path / "run", engine, callbacks=(callback,))
    assert first.stopped == "callback"
    second = task.train(tmp_path / "run", engine, resume=True)
    whole = task.train(tmp_path / "whole", pg.Local(workers=2, threads=1))
    assert same_bits(second.directory, whole.directory)
    assert every_batch_once(second.directory, task.batches)


# -- coming and going -----------------------------------------------------------------------------------------------


def gated(folder: Path, **options: Any) -> Task:
    """A run that goes slowly until its gate is opened, so that it is not over before something has happened."""
    gate = folder / "gate"
    gate.touch()
    options = {"workers": 2, "batches": 400, "counting": 500, "sleep": 0.05, "gate": gate} | options
    return Task(options.pop("scheme", pg.AGN(window=2)), **options)


def test_a_joiner_that_finds_all_places_taken_has_that_of_a_lost_one(tmp_path):
    with Scene(gated(tmp_path, workers=1), tmp_path / "scene") as scene:
        scene.serve()
        first = scene.join()
        scene.until_commits(3)
        scene.join(shared=False)
        log = scene.folder / "worker-1.log"
        scene.until(lambda: log.exists() and "All ranks are taken; this worker waits for one." in log.read_text())
        kill(first)
        scene.workers.remove(first)
        scene.until(lambda: any(incarnation == 1 for _, incarnation, *_ in scene.acknowledged()))
        scene.open_gate()
        scene.wait()
    check_sound(scene)
    whose = [event.data["incarnation"] for event in read(scene.out) if event.kind == "commit"]
    assert set(whose) == {0, 1}
    lost = [event.data["reason"] for event in read(scene.out) if event.kind == "lost"]
    assert lost == ["its connection ended"]


def test_a_joiner_that_never_had_a_place_hears_of_the_end(tmp_path):
    """By an address alone: it has no directory to see the end in."""
    with Scene(gated(tmp_path, workers=1), tmp_path / "scene") as scene:
        scene.serve()
        scene.join()
        scene.until_commits(3)
        scene.join(where=scene.endpoint().address, token_file=scene.out / TOKEN, shared=False)
        log = scene.folder / "worker-1.log"
        scene.until(lambda: log.exists() and "All ranks are taken; this worker waits for one." in log.read_text())
        scene.open_gate()
        scene.wait()
        assert "ended: finished" in log.read_text()


@pytest.mark.parametrize("shared", [False, True])
def test_a_stopped_worker_holds_nobody_up_and_finds_its_way_back(shared, tmp_path):
    task = gated(tmp_path, engine={"replace_after": 1.0})
    with Scene(task, tmp_path / "scene") as scene:
        scene.serve()
        scene.join()
        victim = scene.join(shared=shared)
        scene.until(lambda: {rank for rank, *_ in scene.acknowledged()} == {0, 1})
        os.kill(victim.pid, signal.SIGSTOP)
        scene.until(lambda: scene.has("leave"))
        scene.until_commits(scene.commits() + 5)  # nobody waits for it
        os.kill(victim.pid, signal.SIGCONT)
        scene.until(lambda: any(incarnation == 1 for _, incarnation, *_ in scene.acknowledged()))
        scene.open_gate()
        scene.wait()
    check_sound(scene)
    lost = [event.data["reason"] for event in read(scene.out) if event.kind == "lost"]
    assert set(lost) == {"there was no sign of life for 1 seconds"}  # on a busy machine others may be silent for as long


def test_a_center_that_was_stopped_takes_nobody_for_lost(tmp_path):
    task = gated(tmp_path, engine={"replace_after": 1.0})
    with Scene(task, tmp_path / "scene") as scene:
        center = scene.serve()
        for shared in (False, True):
            scene.join(shared=shared)
        scene.until(lambda: {rank for rank, *_ in scene.acknowledged()} == {0, 1})
        os.kill(center.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(center.pid, signal.SIGCONT)
        scene.until_commits(scene.commits() + 10)
        scene.open_gate()
        scene.wait()
    check_sound(scene)
    assert not [event for event in read(scene.out) if event.kind in ("lost", "leave")]


def test_a_worker_that_was_given_up_and_waits_for_a_place_is_heard_of_once_it_has_one(tmp_path):
    """Its windows are longer than others wait for a silent worker: it must say all the time that it is there."""
    task = gated(tmp_path, workers=1, batches=120, scheme=pg.AGN(window=30), engine={"replace_after": 1.0})
    with Scene(task, tmp_path / "scene") as scene:
        scene.serve()
        waits = scene.join(shared=False)
        scene.until(lambda: scene.has("join"))
        os.kill(waits.pid, signal.SIGSTOP)
        takes = scene.join(shared=False)
        scene.until(lambda: any(incarnation == 1 for _, incarnation, *_ in scene.acknowledged()))
        os.kill(waits.pid, signal.SIGCONT)
        log = scene.folder / "worker-0.log"
        scene.until(lambda: "All ranks are taken; this worker waits for one." in log.read_text())
        kill(takes)
        scene.workers.remove(takes)
        scene.until(lambda: any(incarnation == 2 for _, incarnation, *_ in scene.acknowledged()))
        scene.open_gate()
        scene.wait()
    check_sound(scene)
    assert max(event.data["incarnation"] for event in read(scene.out) if event.kind == "commit") == 2


def test_workers_go_on_with_a_center_that_came_back_from_a_checkpoint_alone(tmp_path):
    task = gated(tmp_path, workers=2, scheme=pg.SyncSGD(), checkpoint_every=0.2)
    with Scene(task, tmp_path / "scene") as scene:
        scene.serve()
        for shared in (False, True):
            scene.join(shared=shared)
        scene.until(lambda: any((scene.out / "checkpoints").glob("[0-9]*")))
        scene.kill_center()
        for left in (*(scene.folder / "memory").iterdir(), scene.out / "center.json"):
            left.unlink()  # as if the machine had been started again
        scene.serve()
        scene.open_gate()
        scene.wait()
    assert every_batch_once(scene.out, task.batches)
    assert [event.kind for event in read(scene.out) if event.kind in ("resume", "restart")] == ["resume"]


def test_a_worker_waits_for_its_own_center_where_another_has_taken_the_port(tmp_path):
    with Scene(gated(tmp_path, workers=1), tmp_path / "scene") as scene:
        scene.serve()
        scene.join(shared=False)
        scene.until_commits(2)
        address = scene.endpoint().address
        scene.kill_center()
        other = replace(scene.task, engine={"address": address})
        with Scene(other, tmp_path / "other") as intruder:
            intruder.serve()
            intruder.endpoint()
            log = scene.folder / "worker-0.log"
            scene.until(lambda: "does not know the token. This worker waits for it." in log.read_text())
        scene.serve()
        scene.open_gate()
        scene.wait()
    check_sound(scene)


def test_where_the_centers_memory_is_out_of_reach_all_goes_over_the_line(tmp_path, monkeypatch):
    """The same machine by its name, but another container: there is no such file."""

    def opened(path: Path) -> int:
        raise FileNotFoundError(path)

    monkeypatch.setattr("paragrad.engines.net.worker._opened", opened)
    task = Task(pg.AGN(window=2), workers=1, batches=20, counting=100)
    before = torch.get_num_threads()
    with Scene(task, tmp_path / "scene") as scene:
        scene.serve()
        assert task.join(scene.out) == "finished"
        scene.wait()
    torch.set_num_threads(before)
    check_sound(scene)


def test_what_a_replaced_worker_still_sends_does_not_fall_into_its_successors_commit(tmp_path):
    """It was stopped in the middle of a commit, given up, and goes on with its bytes while its successor's wait in a round."""
    size = 2000
    task = Task(pg.SyncSGD(), workers=2, batches=8, counting=size, engine={"replace_after": 1.0})
    with Scene(task, tmp_path / "scene") as scene, contextlib.ExitStack() as stack:
        scene.serve()
        scene.endpoint()
        first, other, successor = (Intruder(scene.out, task) for _ in range(3))
        first.join(key="the first")
        other.join(key="the other")
        stay(other, stack)
        answers = both(first.begin, other.begin)
        head = {"op": "commit", **COMMIT.header(Commit(0, 1, 0, torch.empty(0), 1, rows=8, weight=8.0))}
        command_ = encode({**head, **first.me, "batches": answers[0]["batches"], "vectors": [["value", "float32", size]]})
        writer, reader = first.client._client.do_exchange(
            fl.FlightDescriptor.for_command(command_), first.client._options(60.0)
        )
        writer.begin(SCHEMA)
        writer.write_batch(piece(bytes(2 * size)))
        scene.until(lambda: scene.has("leave"))
        assert successor.join(key="the successor")["rank"] == 0
        stay(successor, stack)
        begun = successor.begin()
        sent = threading.Thread(target=successor.commit, args=(begun, torch.full((size,), 2.0)))
        sent.start()
        time.sleep(0.3)  # it waits in the round by now

        def go_on() -> None:
            _write_vectors(writer, {"rest": torch.full((size // 2,), 100.0)})
            writer.done_writing()
            reader.read_chunk()

        with pytest.raises((fl.FlightServerError, fl.FlightInternalError, OSError), match="gone"):
            go_on()
        with contextlib.suppress(OSError, pa.ArrowException):
            writer.close()
        back = other.commit(answers[1], torch.full((size,), 2.0))
        sent.join()
        assert torch.equal(back["value"], torch.full((size,), -2.0)), "the center is torn"


def stay(intruder: Intruder, stack: contextlib.ExitStack) -> None:
    """Say that it is there, until the end."""
    over = threading.Event()

    def beat() -> dict[str, Any] | None:
        return None if over.wait(0.2) else {}

    def run() -> None:
        with contextlib.suppress(pg.errors.ParagradError):
            intruder.client.heartbeat(intruder.me, beat, lambda answer: None)

    thread = threading.Thread(target=run)
    thread.start()
    stack.callback(thread.join)
    stack.callback(over.set)


def both(*calls: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """At the same time: each is answered when all are there."""
    answers: dict[int, dict[str, Any]] = {}
    threads = [threading.Thread(target=lambda k=k, call=call: answers.update({k: call()})) for k, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[k] for k in range(len(calls))]


# -- by hand --------------------------------------------------------------------------------------------------------

RUN = """
data = "rows.npz"
model = "{model}"
scheme = "syncsgd"
epochs = 5000
batch_size = 8
optimizer = "sgd:lr=0.01"
validate_every = "none"
"""


def by_hand(folder: Path, model: str = "mlp:8") -> Path:
    x, y = Task(pg.SyncSGD()).rows()
    np.savez(folder / "rows.npz", x_train=x.numpy(), y_train=y.numpy())
    (folder / "run.toml").write_text(RUN.format(model=model))
    return folder / "out"


def until(condition: Callable[[], bool], *logs: Path) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "\n".join(log.read_text() for log in logs if log.exists())
        time.sleep(0.02)


def test_a_worker_joins_later_leaves_by_ctrl_c_and_its_place_is_free_at_once(tmp_path):
    out = by_hand(tmp_path)

    def has(*words: str) -> int:
        record = out / "record.jsonl"
        lines = record.read_text().splitlines() if record.exists() else []
        return sum(all(word in line for word in words) for line in lines)

    serve = command(tmp_path, "serve", "serve", "run.toml", "--out", "out", "--workers", "2", "--min-workers", "1", "-q")
    stays = command(tmp_path, "stays", "join", "out", "--threads", "1")
    logs = [tmp_path / f"{name}.log" for name in ("serve", "stays", "leaves0", "leaves1")]
    try:
        until(lambda: has('"commit"') > 2, *logs)
        for number, (how, shared) in enumerate(((signal.SIGINT, "--shared"), (signal.SIGTERM, "--no-shared"))):
            leaver = command(tmp_path, f"leaves{number}", "join", "out", "--threads", "1", shared)
            until(lambda number=number: has('"commit"', '"worker":1', f'"incarnation":{number}') > 2, *logs)
            os.kill(leaver.pid, how)
            leaver.join(20)
            log = (tmp_path / f"leaves{number}.log").read_text()
            assert leaver.exitcode == 0, log
            assert "Traceback" not in log
            assert log.splitlines()[-1] == "This worker has left; the others go on without it."
            until(lambda number=number: has('"leave"') == number + 2, *logs)  # the first is of a place that nobody had yet
            commits = has('"commit"')
            until(lambda commits=commits: has('"commit"') > commits, *logs)
        assert not has('"lost"')
        os.kill(serve.pid, signal.SIGINT)
        serve.join(30)
        stays.join(30)
        assert stays.exitcode == 0
        assert (tmp_path / "stays.log").read_text().splitlines()[-1] == "The run was stopped at its center."
        assert not list((tmp_path / "memory").iterdir())
    finally:
        kill(serve)
        kill(stays)


def test_a_joiner_never_imports_a_file_that_only_the_center_names(tmp_path):
    marker = tmp_path / "imported"
    model = tmp_path / "model.py"
    model.write_text(
        f"import os, pathlib\npathlib.Path({str(marker)!r} + str(os.getpid())).touch()\n"
        "from torch import nn\ndef make():\n    return nn.Linear(6, 2)\n"
    )
    out = by_hand(tmp_path, f"{model}:make")
    serve = command(tmp_path, "serve", "serve", "run.toml", "--out", "out", "--workers", "1", "-q")
    try:
        until((out / endpoint.FILE).exists, tmp_path / "serve.log")
        assert [path.name for path in tmp_path.glob("imported*")] == [f"imported{serve.pid}"]
        refused = command(tmp_path, "refused", "join", "out")
        refused.join(60)
        said = (tmp_path / "refused.log").read_text()
        assert refused.exitcode == 2, said
        assert "A worker imports only what its own command line allows" in said
        assert [path.name for path in tmp_path.glob("imported*")] == [f"imported{serve.pid}"]
        allowed = command(tmp_path, "allowed", "join", "out", "--allow-import", str(model), "--threads", "1")
        until(lambda: "commit" in (out / "record.jsonl").read_text(), tmp_path / "allowed.log")
        assert {path.name for path in tmp_path.glob("imported*")} == {f"imported{pid}" for pid in (serve.pid, allowed.pid)}
        kill(allowed)
    finally:
        os.kill(serve.pid, signal.SIGINT)
        serve.join(30)
        kill(serve)


def test_workers_trust_a_certificate_of_the_users_own(tmp_path):
    certificate, _ = endpoint.self_signed(tmp_path, "127.0.0.1")
    own = {"certificate": str(tmp_path / endpoint.CERTIFICATE), "key": str(tmp_path / endpoint.KEY), "address": "127.0.0.1:0"}
    task = Task(pg.AGN(window=2), workers=1, batches=20, counting=100, engine=own)
    with Scene(task, tmp_path / "scene") as scene:
        scene.serve()
        scene.join()
        assert scene.endpoint().certificate.encode() == certificate
        scene.wait()
    check_sound(scene)
