"""The clock of a run: from the start barrier to the last commit, by the wall or by a simulated cluster."""

from __future__ import annotations

import pytest

from paragrad.rundir import clock
from paragrad.rundir.clock import RunClock


@pytest.fixture
def wall(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock.time, "monotonic", lambda: now[0])
    return now


def test_a_run_begins_at_the_barrier_and_ends_with_its_last_commit(wall):
    made = RunClock()
    made._now = lambda: wall[0]
    made.before = 7.0
    wall[0] = 150.0
    assert (made.seconds, made.elapsed, made.wall_seconds) == (7.0, 0.0, 0.0)
    made.go()
    wall[0] = 152.0
    assert (made.seconds, made.elapsed, made.wall_seconds) == (9.0, 2.0, 2.0)
    made.end()
    wall[0] = 160.0
    made.end()  # the first end counts
    assert (made.seconds, made.elapsed, made.wall_seconds) == (9.0, 2.0, 2.0)


def test_virtual_seconds_are_those_of_the_cluster_and_the_walls_are_kept_beside_them(wall):
    made, virtual = RunClock(), [5.0]
    made.use(lambda: virtual[0])
    made.go()
    virtual[0], wall[0] = 65.0, 101.0
    assert made.virtual
    assert (made.seconds, made.wall_seconds) == (60.0, 1.0)
