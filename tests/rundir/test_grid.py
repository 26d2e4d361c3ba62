"""When the center is looked at: every line of the grid gets its one point, whatever the commits are and whoever is killed."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paragrad as pg
from paragrad.rundir.grid import Grid, points_per_epoch, unit_of

UPDATES = st.lists(st.tuples(st.integers(0, 400), st.floats(0.0, 3.0, width=16)), min_size=1, max_size=60)
"""Rows and seconds of each update; rows may be those of several epochs, or none."""
EVERY = st.sampled_from(["epoch", "2s", "0.5s", 1, 3, 7, None])


def walked(updates: list[tuple[int, float]]) -> list[tuple[int, int, float]]:
    """Rows, updates and seconds after each update."""
    rows = accumulate(rows for rows, _ in updates)
    seconds = accumulate(seconds for _, seconds in updates)
    return [(samples, clock, time) for clock, (samples, time) in enumerate(zip(rows, seconds, strict=True), 1)]


def points(grid: Grid, places: list[tuple[int, int, float]], start: tuple[int, int, float] = (0, 0, 0.0)) -> list[int]:
    found = [start[1]] if grid.begin(*start) else []
    return found + [place[1] for place in places if grid.crosses(*place)]


@given(updates=UPDATES, rows=st.integers(1, 300))
def test_the_end_of_every_epoch_has_exactly_one_point_and_so_has_the_start(updates, rows):
    places = walked(updates)
    ends = range(rows, places[-1][0] + 1, rows)
    first = [next(clock for samples, clock, _ in places if samples >= end) for end in ends]
    assert points(Grid("epoch", rows=rows, held_out=1), places) == [0, *sorted(set(first))]


@given(updates=UPDATES, every=EVERY, rows=st.integers(1, 300), cut=st.integers(0, 60))
def test_a_resumed_run_has_the_points_of_an_unbroken_one_and_no_update_has_two(updates, every, rows, cut):
    places = walked(updates)
    whole = points(Grid(every, rows=rows, held_out=1), places)
    assert len(set(whole)) == len(whole)
    before, after = places[:cut], places[cut:]
    resumed = points(Grid(every, rows=rows, held_out=1), before)
    if before:
        resumed += points(Grid(every, rows=rows, held_out=1), after, before[-1])
    else:
        resumed = points(Grid(every, rows=rows, held_out=1), after)
    assert resumed == whole


@given(every=st.integers(1, 9), count=st.integers(1, 50))
def test_a_number_counts_updates(every, count):
    places = walked([(1, 0.1)] * count)
    assert points(Grid(every, rows=10, held_out=1), places) == list(range(0, count + 1, every))


@given(rows=st.integers(1, 30_000_000), held=st.integers(1, 3_000_000), size=st.integers(1, 4096))
def test_a_long_epoch_has_points_on_the_way_but_validation_stays_a_small_part_of_it(rows, held, size):
    parts = points_per_epoch(rows, held)
    assert 1 <= parts <= 10
    assert parts == 1 or (rows // parts >= 50_000 and parts * held / 3 <= rows / 5)
    grid = Grid("epoch", rows=rows, held_out=held)
    grid.begin(0, 0, 0.0)
    lines = [-(-rows * k // parts) for k in range(1, 2 * parts + 1)]
    assert all(grid.crosses(samples, k + 1, 0.0) for k, samples in enumerate(lines))


def test_points_of_known_data():
    assert [points_per_epoch(*both) for both in ((1437, 360), (60_000, 10_000), (200_000, 10_000), (10_500_000, 500_000))] == [
        1,
        1,
        4,
        10,
    ]
    assert points_per_epoch(800_000, 200_000) == 2, "with a fifth held out: one on the way, one at the end"


@pytest.mark.parametrize(
    ("every", "unit"),
    [
        ("epoch", ("epoch", 1.0)),
        ("5s", ("seconds", 5.0)),
        ("0.25s", ("seconds", 0.25)),
        (200, ("updates", 200.0)),
        ("200", ("updates", 200.0)),
        (None, None),
    ],
)
def test_what_it_may_be(every: Any, unit: Any) -> None:
    assert unit_of(every) == unit


@pytest.mark.parametrize(
    ("every", "said"),
    [
        (5.0, "Did you mean '5s'?"),
        ("5.0", "Did you mean '5s'?"),
        ("2.5", "Did you mean '2.5s'?"),
        ("epochs", "Available: 'epoch'"),
        ("0s", "Available"),
        ("5 minutes", "Available"),
        (0, "Available"),
        (-1, "Available"),
        (True, "Available"),
        ("none", "Available"),
    ],
)
def test_what_it_may_not_be_is_refused_with_what_it_may(every: Any, said: str) -> None:
    with pytest.raises(pg.UsageError, match=r"validate_every=") as refused:
        pg.Run(validate_every=every)
    assert said in str(refused.value)
