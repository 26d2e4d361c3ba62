"""Workers killed at every line of the exchange and in the middle of its copies; a reader beside it all."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import paragrad as pg
from paragrad.core.center import Center
from paragrad.data.leases import Leases
from paragrad.engines.process import forkserver
from paragrad.engines.process.forkserver import Fd
from paragrad.engines.process.segment import Segment
from paragrad.schemes.traits import name_of
from paragrad.types import Commit
from tests.conftest import Watch
from tests.engines.exchange.kills import Assassin, gaps, train_counting
from tests.engines.exchange.victim import PACE, Counting, DiesWarmingUp, Doomed, pull_again_and_again

SIZE = 20_000
"""Weights: enough for the C kernel to be used."""

SPARE = 6
"""Lines beyond the longest exchange seen: an answer that is waited for longer has more of them."""


def exchange_lines(scheme: pg.Scheme, folder: Path) -> int:
    """How many lines of Python the worker's side of one exchange has, from its last step to its next."""
    folder.mkdir()
    model = Doomed(SIZE, window=scheme.window, deaths=folder, lines=None)
    train_counting(model, 30 * scheme.window, folder / "run", scheme=scheme, engine=pg.Local(workers=2))
    return max(len(json.loads(line)) for line in (folder / "counted-1").read_text().splitlines())


def kill_at(lines: list[int], scheme: pg.Scheme, folder: Path, **engine: float) -> Watch:
    """One run in which a worker dies at each of these lines of the exchange."""
    deaths = folder / "deaths"
    deaths.mkdir(parents=True)
    model = Doomed(SIZE, window=scheme.window, deaths=deaths, lines=lines)
    watch = Watch()
    result = train_counting(
        model,
        (PACE + 6 * scheme.window) * (len(lines) + 4),
        folder / "run",
        watch,
        scheme=scheme,
        engine=pg.Local(workers=3, **engine),
    )
    assert sorted(int(file.name) for file in deaths.iterdir()) == sorted(lines)
    assert result.summary["lost_workers"] == len(lines)
    assert all("SIGKILL" in event.data["reason"] for event in watch.events if event.kind == "lost")
    return watch


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.chaos), 4])
def test_a_worker_may_be_killed_at_every_line_of_the_exchange(step, tmp_path):
    scheme = pg.AGN(window=2)
    total = exchange_lines(scheme, tmp_path / "count")
    print(f"{name_of(scheme)}: the exchange has {total} lines")
    assert total > 100
    kill_at(list(range(1, total + SPARE, step)), scheme, tmp_path / "kill")


@pytest.mark.parametrize("replace_after", [5.0, 0.0], ids=["waited-for", "given-up"])
@pytest.mark.parametrize("scheme", [pg.SyncSGD(), pg.AEASGD(window=2)], ids=name_of)
def test_a_worker_may_be_killed_at_lines_of_the_exchange_of_other_kinds_of_scheme(scheme, replace_after, tmp_path):
    total = exchange_lines(scheme, tmp_path / "count")
    print(f"{name_of(scheme)}: the exchange has {total} lines")
    kill_at(list(range(5, total, 13)), scheme, tmp_path / "kill", replace_after=replace_after)


def test_workers_may_be_killed_in_the_middle_of_a_copy(tmp_path):
    assassin = Assassin(seed=20, kills=12, every=9, delay=0.006)
    print(f"seed {assassin.seed}")
    model = Counting(1_000_000, sleep=0.001)
    result = train_counting(model, 600, tmp_path / "run", assassin, scheme=pg.AGN(window=1), engine=pg.Local(workers=3))
    assert assassin.done()
    assert result.summary["lost_workers"] == assassin.lost == 12


def test_a_stopped_worker_costs_the_others_nothing(tmp_path):
    stopped_at: list[float] = []

    def stop(watch: Watch, event: pg.Event) -> None:
        watch.signal(1, signal.SIGSTOP)
        stopped_at.append(event.time)

    watch = Watch(at=30, act=stop)
    engine = pg.Local(workers=3, replace_after=1.0)
    result = train_counting(Counting(SIZE, sleep=0.01), 600, tmp_path / "run", watch, scheme=pg.AGN(window=4), engine=engine)
    assert result.summary["lost_workers"] == 1
    (lost,) = [event.time for event in watch.events if event.kind == "lost"]
    commits = [event for event in watch.events if event.kind == "commit" and stopped_at[0] < event.time < lost]
    assert {event.data["worker"] for event in commits} >= {0, 2}
    for worker, (median, longest) in gaps(result.directory, spare={(1, 0)}).items():
        print(f"worker {worker}: median gap {median * 1e3:.0f} ms, longest {longest * 1e3:.0f} ms")
        alone = [event for event in commits if event.data["worker"] == worker]
        assert worker == 1 or len(alone) > 0.5 * (lost - stopped_at[0]) / median


def test_a_worker_killed_while_it_warms_up_is_replaced(tmp_path):
    watch = Watch()
    model = DiesWarmingUp(SIZE, tmp_path / "flag")
    result = train_counting(model, 60, tmp_path / "run", watch, scheme=pg.AGN(window=2), engine=pg.Local(workers=2))
    assert result.summary["lost_workers"] == 1
    order = [event.kind for event in watch.events if event.kind in ("worker", "lost", "go", "commit")]
    assert order[:5] == ["worker", "worker", "lost", "worker", "go"]


def test_a_worker_killed_as_soon_as_it_has_a_pid_is_replaced(tmp_path):
    killed: list[int] = []

    def kill(event: pg.Event) -> None:
        if event.kind == "worker" and len(killed) < 2:
            killed.append(event.data["pid"])
            os.kill(killed[-1], signal.SIGKILL)

    result = train_counting(Counting(SIZE), 60, tmp_path / "run", kill, scheme=pg.SyncSGD(), engine=pg.Local(workers=2))
    assert result.summary["lost_workers"] == 2


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "given-up"])
def test_a_commit_that_waits_in_a_round_counts_whatever_becomes_of_its_worker(replaced, overlap):
    scheme = pg.ModelAveraging(window=1, overlap=overlap)
    center = Center(scheme, torch.zeros(4), workers=3, leases=Leases(batches=9, epochs=1, workers=3))
    held: dict[int, tuple[int, ...]] = {0: (), 1: (), 2: ()}

    def hand_out(replies: list[pg.Reply]) -> None:
        for reply in replies:
            held[reply.worker] += reply.batches

    def commit(worker: int) -> None:
        used, held[worker] = held[worker][:1], held[worker][1:]
        hand_out(center.receive(Commit(worker=worker, sequence=1, version=0, value=torch.ones(4), steps=1, batches=used)))

    for worker in range(3):
        hand_out(center.join(worker))
    commit(1)
    held[1] = ()  # it dies, and what it knew with it
    hand_out(center.join(1, 1) if replaced else center.leave(1))
    commit(0)
    commit(2)
    if not replaced:
        hand_out(center.join(1, 1))
    assert center.ledger.counts.commits == 3
    assert {worker: tuple(sorted(center.leases.held(worker))) for worker in range(3)} == held


@pytest.mark.parametrize("free", [3, 4, 5])
def test_a_descriptor_used_again_by_a_replacement_is_not_taken_for_its_death(free, tmp_path):
    """A dead worker's pipe and its end are seen in one poll; its replacement may get the number of the pipe just closed."""
    forkserver.server()
    low = [os.open("/dev/null", os.O_RDONLY) for _ in range(free)]

    def kill(watch: Watch, event: pg.Event) -> None:
        watch.signal(1, signal.SIGKILL)
        wait_until_dead(watch.pids[1])
        while low:
            os.close(low.pop())

    watch = Watch(at=5, act=kill)
    result = train_counting(Counting(SIZE), 60, tmp_path / "run", watch, scheme=pg.AGN(window=2), engine=pg.Local(workers=2))
    assert result.summary["lost_workers"] == 1


def wait_until_dead(pid: int) -> None:
    """Until the fork server has seen to it that nothing is left of a process."""
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.002)


@pytest.mark.parametrize(("size", "commits"), [(SIZE, 3000), (1_000_000, 400)])
def test_whoever_pulls_while_commits_are_applied_sees_a_whole_state(size, commits, tmp_path):
    segment = Segment()
    leases = Leases(batches=1, epochs=1, workers=1)
    center = Center(pg.Downpour(), torch.zeros(size), workers=1, leases=leases, allocate=segment.allocate)
    center.join(0)
    one = torch.ones(size)
    files = [tmp_path / f"reader-{number}" for number in range(2)]
    children = [
        forkserver.start(pull_again_and_again, Fd(segment.fd), segment.layout, commits, file, name=file.name) for file in files
    ]
    for clock in range(1, commits + 1):
        center.receive(Commit(worker=0, sequence=clock, version=clock - 1, value=one, steps=1))
        while clock == 1 and not all(file.exists() for file in files):
            time.sleep(0.002)
    for child, file in zip(children, files, strict=True):
        child.join()
        found = json.loads(file.read_text())
        print(f"{found}, while {commits} commits were applied to {size:,} weights")
        assert found["torn"] == 0
        assert found["clocks"] > 5  # a busy machine may let a reader run now and then only
    segment.close()
