"""Runs in which workers are killed and stopped, and what must hold of each of them afterwards."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import paragrad as pg
from paragrad.rundir.record import batches_used, effective, read
from tests.engines.exchange.victim import Counting, minus

BATCH = 8


def train_counting(
    model: Counting, batches: int, out: Path, *callbacks: Callable[[pg.Event], None], scheme: pg.Scheme, engine: pg.Local
) -> pg.Result:
    """Train a counting model for one epoch of that many mini-batches, and look at what came out."""
    x = torch.zeros(batches * BATCH, 1)
    run = pg.Run(out=out, callbacks=callbacks, checkpoint_every=None)
    result = pg.train(
        model, (x, x), loss=minus, optimizer="sgd:lr=1", scheme=scheme, engine=engine, batch_size=BATCH, epochs=1, run=run
    )
    check_sound(result, batches)
    return result


def check_sound(result: pg.Result, batches: int) -> None:
    """Every mini-batch was used once, the clock ticked one by one, and no update of the center was torn or made twice."""
    commits = effective(read(result.directory / "record.jsonl"))
    used = batches_used(commits)
    wrong = {position: used[position] for position in range(batches) if used[position] != 1}
    assert not wrong, f"mini-batches not used exactly once: {wrong}"
    assert set(used) == set(range(batches))
    assert result.summary["samples"] == batches * BATCH
    clocks = [commit.data["clock"] for commit in commits]
    assert clocks == sorted(clocks)
    assert set(clocks) == set(range(1, clocks[-1] + 1))
    ledger = Counter((commit.data["worker"], commit.data["sequence"]) for commit in commits)
    assert set(ledger.values()) == {1}
    weights = result.model.weights.detach()
    assert bool(torch.isfinite(weights).all())
    assert torch.equal(weights, weights[:1].expand_as(weights)), "the center is torn"
    if result.summary["scheme"].startswith(("agn", "syncsgd")):  # each update adds one to every weight
        assert abs(float(weights[0]) - clocks[-1]) < 1e-2


@dataclass
class Assassin:
    """A callback that sends signals to random workers, a random moment after one of their commits.

    Each worker is spared until it has made a commit, so that no one dies three times without any, and so is one that is
    already dead or about to be: its last commit may be heard of after the blow.
    """

    seed: int
    kills: int
    every: int
    """Commits between two blows."""
    delay: float
    """Seconds, at most, from the commit to the blow."""
    stops: int = 0
    """How many of the blows are SIGSTOP instead of SIGKILL; every second one of those is continued soon."""
    pause: float = 0.3
    sent: Counter[str] = field(default_factory=Counter)
    stopped: set[tuple[int, int]] = field(default_factory=set)
    lost: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._blows = ["kill"] * self.kills + ["stop"] * self.stops
        self._random.shuffle(self._blows)
        self._pids: dict[int, int] = {}
        self._ripe: dict[int, int] = {}
        self._doomed: set[tuple[int, int]] = set()
        self._commits = 0
        self._threads: list[threading.Thread] = []

    def __call__(self, event: pg.Event) -> None:
        if event.kind == "worker":
            self._pids[event.data["rank"]] = event.data["pid"]
        elif event.kind == "lost":
            self.lost += 1
            self._ripe.pop(event.data["rank"], None)
        elif event.kind == "commit":
            self._commits += 1
            rank, incarnation = event.data["worker"], event.data["incarnation"]
            if (rank, incarnation) not in self._doomed:
                self._ripe[rank] = incarnation
            if self._blows and self._ripe and self._commits % self.every == 0:
                self._strike(self._blows.pop(), rank)

    def _strike(self, blow: str, committer: int) -> None:
        near = committer in self._ripe and self._random.random() < 0.5
        rank = committer if near else self._random.choice(sorted(self._ripe))
        incarnation, pid, wait = self._ripe.pop(rank), self._pids[rank], self._random.uniform(0, self.delay)
        self.sent[blow] += 1
        brief = blow == "stop" and self.sent["stop"] % 2 == 0
        if blow == "stop":
            self.stopped.add((rank, incarnation))
        if not brief:
            self._doomed.add((rank, incarnation))

        def act() -> None:
            time.sleep(wait)
            os.kill(pid, signal.SIGKILL if blow == "kill" else signal.SIGSTOP)
            if brief:
                time.sleep(self.pause)
                os.kill(pid, signal.SIGCONT)

        self._threads.append(threading.Thread(target=act))
        self._threads[-1].start()

    @property
    def deaths(self) -> int:
        """How many workers the run must have lost: the killed, and those stopped for good."""
        return self.sent["kill"] + (self.sent["stop"] + 1) // 2

    def done(self) -> bool:
        """Wait for the last blow; whether all of them were dealt."""
        for thread in self._threads:
            thread.join()
        return not self._blows


def gaps(directory: Path, spare: set[tuple[int, int]]) -> dict[int, tuple[float, float]]:
    """For each worker the median and the largest time between two commits of one process that was not ``spare``d."""
    last: dict[tuple[int, int], float] = {}
    found: dict[int, list[float]] = {}
    for event in read(directory / "record.jsonl"):
        if event.kind == "commit":
            who = (event.data["worker"], event.data["incarnation"])
            if who in last and who not in spare:
                found.setdefault(who[0], []).append(event.time - last[who])
            last[who] = event.time
    return {worker: (statistics.median(times), max(times)) for worker, times in found.items()}
