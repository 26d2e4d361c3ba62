"""The history of a run, read back from its record."""

from __future__ import annotations

from typing import Any

import pytest

from paragrad.errors import UsageError
from paragrad.replay.history import History, read
from paragrad.types import Event


def commit(arrived: int, clock: int, **more: Any) -> Event:
    told = {"worker": 0, "incarnation": 0, "sequence": arrived, "version": clock - 1, "steps": 1, "batches": [arrived]}
    return Event("commit", 0.0, {**told, "arrived": arrived, "clock": clock, "seconds": 1.0, "loss": 0.5, **more})


def join(arrived: int) -> Event:
    return Event("join", 0.0, {"worker": 0, "incarnation": 0, "arrived": arrived})


START = Event("start", 0.0, {"workers": 1})


def resume(arrived: int, path: str | None = "0000000002", waiting: tuple[dict[str, Any], ...] = ()) -> Event:
    return Event("resume", 0.0, {"clock": 0, "path": path, "rows": 0, "arrived": arrived, "waiting": list(waiting)})


def numbers(history: History) -> list[tuple[int, list[int]]]:
    return [(attempt.begins, sorted(attempt.arrivals)) for attempt in history.attempts]


def test_what_came_after_a_checkpoint_that_a_run_went_back_to_is_forgotten():
    first = [START, join(1), commit(2, 1), commit(3, 2), commit(4, 3)]
    second = [START, resume(3), join(4), commit(5, 3)]
    assert numbers(read(first + second)) == [(0, [1, 2, 3]), (3, [4, 5])]
    third = [START, resume(3), join(4)]
    assert numbers(read(first + second + third)) == [(0, [1, 2, 3]), (3, [4])]
    fourth = [START, resume(2), join(3)]
    assert numbers(read(first + second + third + fourth)) == [(0, [1, 2]), (2, [3])]
    assert numbers(read([*first, START, resume(0, path=None), join(1)])) == [(0, [1])]


def test_a_commit_that_waited_in_a_round_at_such_a_checkpoint_was_never_applied():
    waited = dict(commit(3, 2).data)
    history = read([START, join(1), commit(2, 1), commit(3, 2), START, resume(3, waiting=(waited,)), join(4)])
    assert history.attempts[0].arrivals[3].clock is None
    assert history.attempts[0].arrivals[3].batches == (3,)
    assert history.attempts[0].clock == 1


def test_a_commit_that_saw_another_center_than_its_window_began_from_says_so():
    history = read([START, join(1), commit(2, 1), commit(3, 2, saw=0, pulls=[1, 1])])
    assert [history.attempts[0].arrivals[n].saw for n in (2, 3)] == [0, 0]
    assert history.attempts[0].arrivals[3].version == 1
    assert history.attempts[0].arrivals[3].pulls == (1, 1)


def test_a_number_that_was_given_twice_is_refused():
    with pytest.raises(UsageError, match="two arrivals with the number 2: commit 2 of worker 0 and worker 0 joined"):
        read([START, commit(2, 1), join(2)])


@pytest.mark.parametrize("event", [commit(2, 1), resume(3)], ids=["commit", "resume"])
def test_a_record_without_its_beginning_is_refused(event):
    with pytest.raises(UsageError, match="its beginning is missing"):
        read([event])
