"""The law of staleness holds to the last update, whatever order workers commit, crash, leave and join in."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paragrad as pg
from paragrad.analysis.staleness import Balance, balance, by_worker, samples
from paragrad.core.job import Job
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial
from paragrad.laws.bowl import SIZE, Bowl
from paragrad.schemes.traits import name_of
from paragrad.types import Commit, Event

ROWS = Arrays(torch.randn(400, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


class Told:
    """A serial run that writes down joins, leaves, commits and refusals as a record does."""

    def __init__(self, scheme: pg.Scheme, workers: int, *, seed: int = 0, rows: int = 400, epochs: int = 1) -> None:
        plan = Plan(rows=rows, batch_size=4, epochs=epochs)
        self.serial = Serial(Job(scheme, lambda device: Bowl(lr=0.01), ROWS, None, plan, rows), workers, stolen=True)
        self.dice = random.Random(seed)
        self.events: list[Event] = []
        self.in_progress = 0
        """Σ over commits of the other workers that really had a window in progress."""
        self.serial.center.applied = self._applied
        self.serial.center.refused = lambda commit, why: self._tell("refused", worker=commit.worker)
        self._tell("start", overlap=scheme.overlap)
        for rank in range(workers):
            self._tell("join", worker=rank, incarnation=0)
        self.serial.start()

    def _tell(self, kind: str, **data: int) -> None:
        self.events.append(Event(kind, float(len(self.events)), {**data, "arrived": len(self.events)}))

    def _applied(self, commit: Commit) -> None:
        self.in_progress += len(set(self.serial.ready) - {commit.worker})
        names = ("worker", "incarnation", "sequence", "version", "staleness")
        clock, live = self.serial.center.clock, len(self.serial.center.live)
        self._tell("commit", clock=clock, live=live, **{name: getattr(commit, name) for name in names})

    def step(self) -> None:
        if self.serial.ready:
            self.serial.step(self.dice.choice(self.serial.ready))

    def crash(self) -> None:
        if self.serial.center.live:
            rank = self.dice.choice(sorted(self.serial.center.live))
            self._tell("join", worker=rank, incarnation=self.serial.actors[rank].incarnation + 1)
            self.serial.crash(rank)

    def leave(self) -> None:
        if len(self.serial.center.live) > 1:
            rank = self.dice.choice(sorted(self.serial.center.live))
            self._tell("leave", worker=rank)
            self.serial.leave(rank)

    def play(self, story: list[str]) -> Balance:
        for action in story:
            getattr(self, action)()
        return balance(self.events)


story = st.lists(st.sampled_from(["step"] * 8 + ["crash", "leave"]), max_size=60)
ASYNCHRONOUS = [pg.Downpour(), pg.AGN(window=2), pg.AEASGD(window=1), pg.DynSGD(window=1), pg.GEM(), pg.ADAG(window=1)]


@pytest.mark.parametrize("scheme", ASYNCHRONOUS, ids=name_of)
@settings(max_examples=12, deadline=None)
@given(workers=st.integers(1, 6), seed=st.integers(0, 1000), story=story)
def test_staleness_is_what_the_others_did_meanwhile(scheme, workers, seed, story):
    told = Told(scheme, workers, seed=seed)
    found = told.play(story)
    assert found.staleness == found.others - found.unfinished
    assert found.elsewhere == 0
    assert found.others == told.in_progress
    assert found.staleness == sum(sample.staleness for sample in samples(told.events))


OVERLAPPING = [pg.Downpour(overlap=1), pg.AGN(window=2, overlap=1), pg.AEASGD(window=1, overlap=1)]


@pytest.mark.parametrize("scheme", OVERLAPPING, ids=repr)
@settings(max_examples=12, deadline=None)
@given(workers=st.integers(1, 6), seed=st.integers(0, 1000), story=story)
def test_with_overlap_a_worker_has_two_windows_in_progress(scheme, workers, seed, story):
    told = Told(scheme, workers, seed=seed)
    found = told.play(story)
    assert found.staleness == found.others - found.unfinished
    assert found.elsewhere == 0
    assert found.others == sum(2 * event.data["live"] - 1 for event in told.events if event.kind == "commit")


@dataclass(frozen=True)
class Half(pg.ModelAveraging):
    """Rounds of half the workers, which wait."""

    def quorum(self, workers: int) -> int:
        return max(1, workers // 2)


ELSEWHERE = [
    pg.Downpour(bound=1),
    pg.SyncSGD(),
    pg.SoftSync(),
    pg.SoftSync(splits=2),
    pg.BackupWorkers(),
    pg.DeanDownpour(),
    pg.Downpour(overlap=1, bound=1),
    pg.SyncSGD(overlap=1),
    pg.SoftSync(splits=2, overlap=1),
    Half(window=1),
]


@pytest.mark.parametrize("scheme", ELSEWHERE, ids=repr)
@settings(max_examples=12, deadline=None)
@given(workers=st.integers(2, 6), seed=st.integers(0, 1000), story=story)
def test_both_sides_are_equal_for_any_scheme(scheme, workers, seed, story):
    assert Told(scheme, workers, seed=seed).play(story).holds


@given(workers=st.integers(1, 5), seed=st.integers(0, 1000), story=story)
@settings(max_examples=25, deadline=None)
def test_both_sides_are_equal_to_the_end_of_the_rows(workers, seed, story):
    told = Told(pg.Downpour(), workers, seed=seed, rows=60)
    told.play(story)
    while told.serial.ready:
        told.step()
    assert balance(told.events).holds


@given(workers=st.integers(1, 5), seed=st.integers(0, 1000), crashes=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_a_record_without_joins_is_read_from_the_versions(workers, seed, crashes):
    told = Told(pg.Downpour(), workers, seed=seed)
    told.play((["step"] * 7 + ["crash"]) * crashes + ["step"] * 9)
    assert balance(event for event in told.events if event.kind == "commit").holds


def mean(scheme: pg.Scheme, workers: int) -> float:
    told = Told(scheme, workers, epochs=8)
    for _ in range(600):
        told.step()
    commits = [event.data["staleness"] for event in told.events if event.kind == "commit"]
    return sum(commits) / len(commits)


def test_the_means_that_follow_from_the_law():
    assert mean(pg.Downpour(), 4) == pytest.approx(3, abs=0.05)
    assert mean(pg.Downpour(overlap=1), 4) == pytest.approx(7, abs=0.1)
    assert mean(pg.SoftSync(splits=2), 4) == pytest.approx(3 / 2, abs=0.05)
    assert mean(Half(window=1), 4) == pytest.approx(1, abs=0.05)
    assert mean(pg.SyncSGD(), 4) == 0
    assert mean(pg.SyncSGD(overlap=1), 4) == pytest.approx(1, abs=0.05)


def commit(worker: int, clock: int, version: int, **data: float) -> Event:
    fields = {"worker": worker, "clock": clock, "version": version, "staleness": clock - 1 - version}
    return Event("commit", float(clock), {**fields, **data})


def test_a_resumed_run_counts_what_the_final_center_is_made_of():
    before = [Event("join", 0, {"worker": 0}), Event("join", 0, {"worker": 1}), commit(0, 1, 0), commit(1, 2, 0)]
    lost = [commit(0, 3, 1), commit(0, 4, 3)]
    after = [
        Event("resume", 9, {"clock": 2}),
        Event("join", 9, {"worker": 0}),
        Event("join", 9, {"worker": 1}),
        commit(1, 3, 2),
    ]
    assert balance([*before, *lost, *after]) == Balance(commits=3, updates=3, staleness=1, others=3, unfinished=2, elsewhere=0)


def test_a_refused_window_is_lost():
    joins = [Event("join", 0, {"worker": 0}), Event("join", 0, {"worker": 1})]
    refused = [commit(0, 1, 0), Event("refused", 1, {"worker": 1}), commit(1, 2, 1)]
    assert balance([*joins, *refused]) == Balance(commits=2, updates=2, staleness=0, others=2, unfinished=2, elsewhere=0)


def test_a_missing_line_shows():
    told = Told(pg.Downpour(), 3)
    told.play(["step"] * 12)
    missing = next(i for i, event in enumerate(told.events) if event.kind == "commit")
    assert not balance(told.events[:missing] + told.events[missing + 1 :]).holds


def test_a_distance_belongs_to_the_commit_before():
    events = [commit(0, 1, 0), commit(1, 2, 0), commit(0, 3, 1, distance=0.5), commit(1, 4, 2, incarnation=1, distance=9.0)]
    assert [sample.distance for sample in samples(events)] == [0.5, None, None, None]
    first, second = by_worker(samples(events))
    assert (first.distance, second.distance) == (0.5, None)
    assert (first.commits, first.staleness.mean, first.staleness.max) == (2, 0.5, 1)
    assert second.staleness.histogram == {1: 2}
