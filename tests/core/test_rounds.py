"""A round: which commits wait, and when there are enough of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paragrad as pg
from paragrad.core.rounds import Round, check_names, check_quorum
from paragrad.data.leases import Leases
from paragrad.types import Commit


def commit(worker: int, sequence: int = 1, batches: tuple[int, ...] = ()) -> Commit:
    return Commit(worker, sequence, 0, torch.zeros(2), 1, batches=batches)


def leases(workers: int) -> Leases:
    made = Leases(batches=100, epochs=1, workers=workers)
    for worker in range(workers):
        made.take(worker, 1)
    return made


def test_one_commit_is_a_round_where_the_quorum_is_1():
    round_ = Round(pg.AGN(), 3)
    assert not round_.is_complete({0, 1, 2}, leases(3))
    round_.add(commit(1))
    assert round_.is_complete({0, 1, 2}, leases(3))
    assert not round_.gathers


@given(st.permutations(range(4)))
def test_a_synchronous_round_wants_every_live_worker_with_rows(order):
    round_ = Round(pg.SyncSGD(), 4)
    for count, worker in enumerate(order):
        assert not round_.is_complete({0, 1, 2, 3}, leases(4))
        round_.add(commit(worker))
        assert len(round_.commits) == count + 1
    assert round_.is_complete({0, 1, 2, 3}, leases(4))
    assert [c.worker for c in round_.take()] == [0, 1, 2, 3], "a round is applied in the order of its workers"
    assert round_.commits == []


def test_nobody_waits_for_a_worker_that_is_gone_or_has_no_rows():
    round_ = Round(pg.SyncSGD(), 3)
    round_.add(commit(0))
    held = leases(3)
    assert not round_.is_complete({0, 1}, held)
    assert round_.is_complete({0}, held)
    held.give_back(1)
    assert round_.is_complete({0, 1}, held)


def test_a_commit_whose_worker_goes_on_is_copied_and_another_is_not():
    for scheme, copied in ((pg.SoftSync(), True), (pg.SyncSGD(), False)):
        round_, mine = Round(scheme, 3), commit(0)
        round_.add(mine)
        mine.value.fill_(9)
        assert (float(round_.commits[0].value[0]) == 0) is copied
        assert round_.blocked == (set() if copied else {0})


def test_what_waits_is_found_by_worker_and_sequence():
    round_ = Round(pg.SoftSync(splits=1), 3)
    round_.add(commit(0, 1, (4, 5)))
    round_.add(commit(2, 1, (6,)))
    round_.add(commit(0, 2, (7,)))
    assert round_.batches(0) == (4, 5, 7)
    assert (round_.count(0), round_.count(1)) == (3, 0)
    assert [c.sequence for c in round_.of(0)] == [1, 2]
    assert round_.holds(commit(0, 2))
    assert not round_.holds(commit(2, 2))
    taken = round_.take()
    round_.put_back(taken[1:])
    assert [(c.worker, c.sequence) for c in round_.commits] == [(0, 2), (2, 1)]


class Everyone(pg.AGN):
    def quorum(self, workers: int) -> int:
        return workers


class Nobody(pg.AGN):
    def quorum(self, workers: int) -> int:
        return 0


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (Nobody(), "quorum of 0 commits from 3 workers"),
        (Everyone(bound=1), "a bound on staleness has no meaning"),
    ],
)
def test_a_quorum_that_cannot_be_is_refused(scheme, said):
    with pytest.raises(pg.UsageError, match=said):
        check_quorum(scheme, 3)


def test_a_text_in_the_place_of_names_is_refused():
    class Slip(pg.AGN):
        center_slots = "momentum"

    with pytest.raises(pg.UsageError, match=r"Slip\.center_slots is a string, but must be a tuple"):
        check_names(Slip(), ("center_slots", "sends"))
