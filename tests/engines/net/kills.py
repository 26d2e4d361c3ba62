"""What must hold of a run whose center was killed, or its workers, again and again."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file

from paragrad.rundir.record import batches_used, effective, read
from tests.conftest import kill
from tests.engines.net.victim import BATCH, Scene, Task


def check_sound(scene: Scene) -> dict[str, int]:
    """Every mini-batch once; every commit that a worker was told of applied once, and in the record; nothing left behind."""
    task = scene.task
    events = list(read(scene.out))
    commits = effective(events)
    used = batches_used(events)
    wrong = {position: used[position] for position in range(task.batches * task.epochs) if used[position] != 1}
    assert not wrong, f"mini-batches not used exactly once: {wrong}"
    assert len(used) == task.batches * task.epochs
    made = Counter((commit.data["worker"], commit.data["sequence"]) for commit in commits)
    doubled = sum(count - 1 for count in made.values())
    told = Counter((rank, sequence) for rank, _, sequence, applied, _ in scene.acknowledged() if applied)
    doubled += sum(count - 1 for count in told.values())
    by_whom = {(commit.data["worker"], commit.data["incarnation"], commit.data["sequence"]) for commit in commits}
    acknowledged = {
        (rank, incarnation, sequence) for rank, incarnation, sequence, applied, _ in scene.acknowledged() if applied
    }
    lost = len(acknowledged - by_whom)
    assert (lost, doubled) == (0, 0), f"of {len(told)} acknowledged commits {lost} were lost, {doubled} doubled"
    clocks = [commit.data["clock"] for commit in commits]
    assert clocks == sorted(clocks)
    assert set(clocks) == set(range(1, clocks[-1] + 1))
    assert sum(commit.data["rows"] for commit in commits) == task.batches * task.epochs * BATCH
    if task.counting:
        weights = load_file(scene.out / "model.safetensors")["weights"]
        assert bool(torch.isfinite(weights).all())
        assert torch.equal(weights, weights[:1].expand_as(weights)), "the center is torn"
    assert not list((scene.folder / "memory").iterdir()), "a center's memory was left behind"
    return {"acknowledged": len(told), "lost": lost, "doubled": doubled}


def same_bits(one: Path, other: Path) -> bool:
    """Whether two runs ended on the same model, to the last bit."""
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def kill_the_center(task: Task, folder: Path, *, kills: int, seed: int, shared: tuple[bool, ...] = (True, False)) -> Scene:
    """A run whose center is killed again and again: at any moment, or at any line of what it does with a commit."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "gate").touch()
    with Scene(replace(task, gate=folder / "gate"), folder) as scene:
        center = scene.serve()
        for number in range(task.workers):
            scene.join(shared=shared[number % len(shared)])
        for _ in range(kills):
            if rng.random() < 0.7:  # at work
                before = scene.commits()
                scene.until(lambda before=before, center=center: scene.commits() > before or center.exitcode is not None)
                time.sleep(rng.uniform(0, 0.1))
            else:  # while it starts
                time.sleep(rng.uniform(0, 0.5))
            assert center.exitcode in (None, -9), scene.logs()
            scene.kill_center()
            center = scene.serve(fate=rng.randrange(1 << 30) if rng.random() < 0.5 else None)
        scene.open_gate()
        center.join(60)
        if center.exitcode == -9:  # its fate came after the last blow
            scene.kills += 1
            scene.serve()
        scene.wait()
    return scene


def kill_workers(task: Task, folder: Path, *, kills: int, stops: int, seed: int) -> tuple[Scene, dict[str, float]]:
    """A run whose workers are killed, or stopped, at any moment, each replaced by one that joins; and how long that took."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "gate").touch()
    waited: list[float] = []
    blows = ["kill"] * kills + ["stop"] * stops
    rng.shuffle(blows)
    with Scene(replace(task, gate=folder / "gate"), folder) as scene:
        scene.serve()
        alive = [scene.join(shared=number % 2 == 0) for number in range(task.workers)]
        scene.until(lambda: len({rank for rank, *_ in scene.acknowledged()}) == task.workers)
        stopped, spare = [], set[int]()
        for blow in blows:
            time.sleep(rng.uniform(0.1, 0.4))
            victim = alive.pop(rng.randrange(len(alive)))
            os.kill(victim.pid, signal.SIGKILL if blow == "kill" else signal.SIGSTOP)
            began, number = time.monotonic(), len(scene.workers)
            alive.append(scene.join(shared=rng.random() < 0.5))
            if blow == "stop":
                stopped.append(victim)
                spare.add(scene.workers.index(victim))
                if len(stopped) > 1:  # no more of them at a time than there are places to spare
                    kill(stopped.pop(0))
            notes = folder / f"notes-{number}"
            scene.until(lambda notes=notes: notes.exists() and notes.stat().st_size > 0)
            if blow == "kill":
                waited.append(time.monotonic() - began)
        for victim in stopped:
            kill(victim)
        scene.open_gate()
        for worker in scene.workers:
            if worker not in alive:
                worker.join()
        scene.workers = alive
        scene.wait()
    return scene, {"replaced after": max(waited), "gap": longest_gap(scene, spare)}


def longest_gap(scene: Scene, spare: set[int]) -> float:
    """The longest time between two answers that a worker had while the gate was shut, in medians of its own; those that were
    stopped are ``spare``d."""
    ratios = []
    for number in range(len(list(scene.folder.glob("worker-*.log")))):
        notes = scene.folder / f"notes-{number}"
        if number not in spare and notes.exists():
            times = [json.loads(line)[-1] for line in notes.read_text().splitlines() if line.endswith("]")]
            gaps = [after - before for before, after in pairwise(times) if after < scene.opened_at]
            if len(gaps) > 5:
                ratios.append(max(gaps) / statistics.median(gaps))
    return max(ratios, default=math.nan)
