"""Temporal efficiency: the ratio of the areas below two curves of accuracy against time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paragrad.analysis.efficiency import accuracy, area, efficiency
from paragrad.errors import UsageError
from paragrad.types import Event


def look(time: float, value: float | None, clock: int = 0) -> Event:
    return Event(
        "validation", time, {"seconds": time, "clock": clock, "loss": 1.0} | ({} if value is None else {"accuracy": value})
    )


def test_an_area_is_that_of_trapezoids_from_nothing_at_the_start():
    assert area([(2.0, 0.5), (4.0, 0.9)], 4.0) == pytest.approx(0.5 + 1.4)
    assert area([(0.0, 0.5), (4.0, 0.5)], 4.0) == pytest.approx(2.0)


def test_the_last_trapezoid_is_cut_where_time_is_up():
    assert area([(2.0, 0.5), (4.0, 0.9)], 3.0) == pytest.approx(0.5 + 0.6)
    assert area([(2.0, 0.5), (4.0, 0.9)], 1.0) == pytest.approx(0.125)
    assert area([(2.0, 0.5), (4.0, 0.9)], 2.0) == pytest.approx(0.5)


def test_the_shorter_run_sets_the_time():
    short, long = [(1.0, 0.8), (2.0, 0.8)], [(1.0, 0.4), (2.0, 0.4), (100.0, 1.0)]
    assert efficiency(short, long) == pytest.approx(2.0)
    assert efficiency(long, short) == pytest.approx(0.5)


curves = st.lists(st.tuples(st.floats(0.1, 50), st.floats(0.05, 1)), min_size=2, max_size=9, unique_by=lambda p: p[0]).map(
    sorted
)


@given(a=curves, b=curves)
def test_two_runs_compare_alike_from_both_sides(a, b):
    assert efficiency(a, a) == pytest.approx(1)
    assert efficiency(a, b) * efficiency(b, a) == pytest.approx(1)
    assert efficiency([(t, f / 2) for t, f in a], b) == pytest.approx(efficiency(a, b) / 2)


def test_what_a_resumed_run_went_back_behind_does_not_count():
    events = [look(1, 0.5, 5), look(2, 0.9, 9), Event("resume", 1.5, {"clock": 6}), look(2.5, 0.6, 9), look(3, None, 10)]
    assert accuracy(events) == [(1, 0.5), (2.5, 0.6)]


@pytest.mark.parametrize("events", [[], [look(1, 0.5)], [look(1, None), look(2, None)]])
def test_too_few_validations_are_refused(events):
    with pytest.raises(UsageError, match=r"runs/first.*2 are needed.*--validate-every"):
        accuracy(events, name="runs/first")


def test_nothing_can_be_compared_with_nothing():
    with pytest.raises(UsageError, match="an accuracy of 0"):
        efficiency([(1.0, 0.5), (2.0, 0.5)], [(1.0, 0.0), (2.0, 0.0)])
