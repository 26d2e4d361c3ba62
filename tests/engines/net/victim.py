"""A center and workers in processes of their own, to be killed: what they train, and what they write down of it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import paragrad as pg
from paragrad.engines.net import request
from paragrad.engines.net.worker import Joined, NetworkExchange
from paragrad.engines.process import forkserver, mapped_file
from paragrad.engines.transport.endpoint import FILE, Endpoint
from paragrad.types import Reply
from tests.conftest import kill
from tests.engines.exchange.victim import PACKAGE, Counting, minus

BATCH = 8
AT_THE_CENTER = ("core/center.py", "core/update.py", "core/view.py", "core/state.py", "rundir/session.py", "rundir/record.py")
AT_THE_CENTER += ("engines/net/center_loop.py", "engines/exchange/center_loop.py", "engines/net/durable_state.py")
AT_THE_CENTER += ("engines/exchange/slot.py", "data/leases.py", "schemes/")
"""The files whose lines make up what the center does with a commit."""


@dataclass(frozen=True)
class Task:
    """What is trained."""

    scheme: pg.Scheme
    workers: int = 2
    batches: int = 100
    epochs: int = 1
    counting: int = 0
    """Weights of a model that counts; 0: a small network on random rows, whose every bit depends on what was done before."""
    sleep: float = 0.0
    """Seconds that a step takes at least."""
    gate: Path | None = None
    """Steps take that long only while there is this file."""
    optimizer: str = "sgd:lr=1"
    engine: dict[str, Any] = field(default_factory=dict)
    checkpoint_every: float | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        pace = ComputeTime(self.sleep, self.gate)
        return Paced(self.counting, pace) if self.counting else Slow(pace)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.counting:
            x = torch.zeros(self.batches * BATCH, 1)
            return x, x
        x = torch.randn(self.batches * BATCH, 6, generator=torch.Generator().manual_seed(2))
        return x, (x[:, 0] * x[:, 1] > 0).long()

    @property
    def loss(self) -> Any:
        return minus if self.counting else "crossentropy"

    def train(self, out: Path, engine: Any, **run: Any) -> pg.Result:
        """In this process, by whichever engine."""
        return pg.train(
            self.model(),
            self.rows(),
            loss=self.loss,
            optimizer=self.optimizer,
            scheme=self.scheme,
            engine=engine,
            batch_size=BATCH,
            epochs=self.epochs,
            run=pg.Run(out=out, checkpoint_every=self.checkpoint_every, validate_every=None, **run),
        )

    def join(self, where: str | Path, **options: Any) -> str:
        """Work for its center."""
        return pg.join(
            where, self.model(), self.rows(), loss=self.loss, optimizer=self.optimizer, scheme=self.scheme, threads=1, **options
        )


@dataclass(frozen=True)
class ComputeTime:
    """How long a step takes at least, for as long as the gate is there."""

    seconds: float
    gate: Path | None

    def keep(self) -> None:
        if self.seconds and (self.gate is None or self.gate.exists()):
            time.sleep(self.seconds)


class Paced(Counting):
    """Counts, at a pace."""

    def __init__(self, size: int, pace: ComputeTime) -> None:
        super().__init__(size)
        self.pace = pace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.pace.keep()
        return super().forward(x)


class Slow(nn.Sequential):
    """A small network with buffers, at a pace."""

    def __init__(self, pace: ComputeTime) -> None:
        super().__init__(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
        self.pace = pace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.pace.keep()
        return super().forward(x)


# -- processes ------------------------------------------------------------------------------------------------------


def _serve(task: Task, out: Path, seed: int | None, host: str | None, log: Path) -> None:
    _quiet(log)
    _enter(host)
    torch.set_num_threads(1)
    forkserver.server = lambda: None  # type: ignore[assignment,return-value]  # no workers of its own: nothing to start them
    mapped_file.FAST = out.parent / "memory"  # where it is seen what was left behind
    mapped_file.FAST.mkdir(exist_ok=True)
    request.HOLD = 0.3  # who waits for an answer asks again and again
    if seed is not None:
        sys.settrace(_Fate(seed))
    task.train(out, pg.Network(workers=task.workers, **task.engine), resume="auto")


def _work(task: Task, where: str | Path, notes: Path, host: str | None, options: dict[str, Any], log: Path) -> None:
    _quiet(log)
    _enter(host)
    file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    receive = NetworkExchange.receive

    def noting(self: NetworkExchange) -> Reply:
        reply = receive(self)
        if reply.sequence > 0:
            told = [self.me.rank, self._incarnation, reply.sequence, reply.applied, time.monotonic()]  # type: ignore[attr-defined]
            os.write(file, (json.dumps(told) + "\n").encode())
        return reply

    init = NetworkExchange.__init__

    def begun(self: NetworkExchange, joined: Joined, *arguments: Any) -> None:
        self._incarnation = joined.placement.incarnation  # type: ignore[attr-defined]
        init(self, joined, *arguments)

    NetworkExchange.__init__, NetworkExchange.receive = begun, noting  # type: ignore[method-assign]
    print("ended:", task.join(where, **options))


def _enter(host: str | None) -> None:
    """Go to another network namespace: from there on, this process is on another host."""
    if host is not None:
        with open(f"/var/run/netns/{host}", encoding="ascii") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {host}")


def _command(arguments: list[str], folder: Path, log: Path) -> None:
    """What ``paragrad ...`` does, in a process that has torch loaded already."""
    _quiet(log)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(folder)
    forkserver.server = lambda: None  # type: ignore[assignment,return-value]
    mapped_file.FAST = folder / "memory"
    mapped_file.FAST.mkdir(exist_ok=True)
    from paragrad.cli.main import app

    app(arguments, prog_name="paragrad")


def command(folder: Path, name: str, *arguments: str) -> BaseProcess:
    """Start a command of ours in a folder; what it prints is in NAME.log there."""
    return forkserver.start(_command, list(arguments), folder, folder / f"{name}.log", name=name)


def _quiet(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


class _Fate:
    """Ends the process at one line of what the center does, drawn at random: some hundred lines make an exchange."""

    def __init__(self, seed: int) -> None:
        self.left = random.Random(seed).randrange(1, 12_000)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        return self.line if name.startswith(PACKAGE) and name.removeprefix(PACKAGE).startswith(AT_THE_CENTER) else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.line


class Scene:
    """A center and its workers; all of them end with the scene."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task = task
        self.folder = folder
        self.out = folder / "run"
        self.center: BaseProcess | None = None
        self.workers: list[BaseProcess] = []
        self.kills = 0
        self.opened_at = 0.0
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.workers, *([] if self.center is None else [self.center])]:
            kill(process)

    def serve(self, *, fate: int | None = None, host: str | None = None) -> BaseProcess:
        """Start the center, for the first time or again; ``fate`` is the seed of the line that it dies at."""
        self.center = forkserver.start(_serve, self.task, self.out, fate, host, self.folder / "center.log", name="center")
        return self.center

    def join(self, where: str | Path | None = None, *, host: str | None = None, **options: Any) -> BaseProcess:
        """One more worker."""
        number = len(self.workers)
        log, notes = self.folder / f"worker-{number}.log", self.folder / f"notes-{number}"
        process = forkserver.start(_work, self.task, where or self.out, notes, host, options, log, name=f"joiner-{number}")
        self.workers.append(process)
        return process

    def kill_center(self) -> None:
        """SIGKILL, and gone."""
        assert self.center is not None
        kill(self.center)
        self.kills += 1

    def wait(self, seconds: float = 120.0) -> None:
        """Until the run is over; the workers are told, and end."""
        assert self.center is not None
        self.center.join(seconds)
        assert self.center.exitcode == 0, self.logs()
        for worker in self.workers:
            if worker.exitcode is None:
                worker.join(20)
                assert worker.exitcode == 0, self.logs()

    def commits(self) -> int:
        """How many the record has so far."""
        record = self.out / "record.jsonl"
        return record.read_bytes().count(b'"event":"commit"') if record.exists() else 0

    def has(self, kind: str) -> bool:
        """Whether the record has an event of that kind."""
        record = self.out / "record.jsonl"
        return record.exists() and f'"event":"{kind}"'.encode() in record.read_bytes()

    def until(self, condition: Any, seconds: float = 60.0) -> None:
        """Wait for something to become true."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited in vain\n{self.logs()}"
            time.sleep(0.01)

    def until_commits(self, count: int) -> None:
        """Wait until the record has so many."""
        self.until(lambda: self.commits() >= count)

    def open_gate(self) -> None:
        """All that was to happen has happened."""
        assert self.task.gate is not None
        self.opened_at = time.monotonic()
        self.task.gate.unlink()

    def endpoint(self) -> Endpoint:
        """Where the center listens."""
        self.until((self.out / FILE).exists)
        return Endpoint.read(self.out)

    def acknowledged(self) -> Iterator[tuple[int, int, int, bool, float]]:
        """(rank, incarnation, sequence, applied, when) of every answer that a worker had."""
        for notes in sorted(self.folder.glob("notes-*")):
            for line in notes.read_text().splitlines():
                with contextlib.suppress(ValueError):  # a last line cut short by a kill
                    yield tuple(json.loads(line))

    def logs(self) -> str:
        """What all of them had to say."""
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))
