"""Laws of the leases: whatever happens to the workers, every mini-batch is used exactly once."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paragrad.data.leases import Leases
from paragrad.errors import UsageError

ACTIONS = ("take", "take", "take", "retire", "retire", "give_back", "abandon", "welcome", "checkpoint")
stories = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 4), st.integers(0, 4)), max_size=60)


class Story:
    """Leases and what should be true of them."""

    def __init__(self, leases: Leases, aligned: bool) -> None:
        self.leases = leases
        self.aligned = aligned
        self.gone: set[int] = set()
        self.retired: list[int] = []

    def take(self, worker: int, count: int) -> tuple[int, ...]:
        if worker in self.gone:
            return ()
        could = self.leases.remain(worker)
        before = self.leases.held(worker)
        taken = self.leases.take(worker, count, aligned=self.aligned)
        assert len(taken) <= count
        assert could or not taken
        assert self.leases.held(worker) == before + taken
        return taken

    def retire(self, worker: int, count: int) -> None:
        batches = self.leases.held(worker)[:count]
        self.leases.retire(worker, batches)
        self.retired += batches

    def give_back(self, worker: int, count: int) -> None:
        self.leases.give_back(worker)

    def abandon(self, worker: int, count: int) -> None:
        if len(self.gone | {worker}) < self.leases.workers:
            self.leases.abandon(worker)
            self.gone.add(worker)

    def welcome(self, worker: int, count: int) -> None:
        self.leases.welcome(worker)
        self.gone.discard(worker)

    def checkpoint(self, worker: int, count: int) -> None:
        self.leases = Leases.from_state(json.loads(json.dumps(self.leases.state())))

    def check(self) -> None:
        held = [position for worker in range(self.leases.workers) for position in self.leases.held(worker)]
        assert len(held + self.retired) == len(set(held + self.retired))
        assert self.leases.used == len(self.retired)

    def finish(self) -> None:
        here = [worker for worker in range(self.leases.workers) if worker not in self.gone]
        for _ in range(4 * self.leases.total + 4):
            for worker in here:
                self.take(worker, 1)
                self.check()
                self.retire(worker, len(self.leases.held(worker)))
            if not any(self.leases.remain(worker) for worker in here):
                return
        raise AssertionError("the stream does not end")


@given(
    batches=st.integers(1, 12),
    epochs=st.integers(1, 3),
    workers=st.integers(1, 5),
    stolen=st.booleans(),
    aligned=st.booleans(),
    story=stories,
)
@settings(max_examples=300, deadline=None)
def test_every_batch_is_retired_exactly_once_whatever_happens(batches, epochs, workers, stolen, aligned, story) -> None:
    told = Story(Leases(batches=batches, epochs=epochs, workers=workers, stolen=stolen), aligned)
    for action, worker, count in story:
        getattr(told, action)(worker % workers, count)
        told.check()
    told.finish()
    assert sorted(told.retired) == list(range(batches * epochs))


@given(batches=st.integers(1, 13), epochs=st.integers(1, 3), workers=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_a_dealt_and_aligned_round_is_the_next_n_batches_of_its_epoch(batches, epochs, workers) -> None:
    leases = Leases(batches=batches, epochs=epochs, workers=workers)
    for epoch in range(epochs):
        for first in range(0, batches, workers):
            taken = [leases.take(worker, 1, aligned=True) for worker in range(workers)]
            expected = [(epoch * batches + first + w,) if first + w < batches else () for w in range(workers)]
            assert taken == expected
            for worker, mine in enumerate(taken):
                leases.retire(worker, mine)
    assert not any(leases.remain(worker) for worker in range(workers))


@given(batches=st.integers(1, 13), workers=st.integers(1, 5), window=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_an_aligned_window_covers_that_many_rounds(batches, workers, window) -> None:
    leases = Leases(batches=batches, epochs=2, workers=workers)
    rounds = -(-batches // workers)
    for first in range(0, 2 * rounds, window):
        together = sorted(p for worker in range(workers) for p in leases.take(worker, window, aligned=True))
        expected = []
        for at in range(first, min(first + window, 2 * rounds)):
            epoch, place = divmod(at, rounds)
            expected += [epoch * batches + b for b in range(place * workers, min((place + 1) * workers, batches))]
        assert together == expected


def test_stolen_batches_go_in_order_to_whoever_asks() -> None:
    leases = Leases(batches=5, epochs=1, workers=2, stolen=True)
    assert [leases.take(0, 2), leases.take(1, 1), leases.take(0, 9)] == [(0, 1), (2,), (3, 4)]


def test_batches_given_back_are_done_again_first() -> None:
    leases = Leases(batches=6, epochs=1, workers=2)
    assert leases.take(0, 2) == (0, 2)
    leases.give_back(0)
    assert leases.take(0, 3) == (0, 2, 4)


def test_what_an_abandoned_worker_held_remains_for_the_others() -> None:
    leases = Leases(batches=2, epochs=1, workers=2)
    leases.retire(0, leases.take(0, 1))
    leases.take(1, 1)
    assert not leases.remain(0)
    leases.abandon(1)
    assert leases.remain(0)
    assert leases.take(0, 1) == (1,)


def test_a_worker_that_comes_back_has_its_share_to_itself() -> None:
    leases = Leases(batches=6, epochs=1, workers=2)
    leases.abandon(1)
    leases.welcome(1)
    assert leases.take(0, 9) == (0, 2, 4)
    assert leases.take(1, 9) == (1, 3, 5)


def test_a_batch_that_is_not_leased_cannot_be_retired() -> None:
    leases = Leases(batches=4, epochs=1, workers=2)
    leases.take(0, 1)
    with pytest.raises(UsageError, match="Worker 0 committed mini-batch 3"):
        leases.retire(0, (0, 3))
    with pytest.raises(UsageError, match="twice"):
        leases.retire(0, (0, 0))
    assert leases.held(0) == (0,)
    assert leases.used == 0


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 3), st.booleans(), st.lists(st.integers(0, 99), max_size=60))
@settings(max_examples=80, deadline=None)
def test_the_floor_is_the_lowest_position_that_is_not_retired(workers, batches, epochs, stolen, choices):
    leases = Leases(batches=batches, epochs=epochs, workers=workers, stolen=stolen)
    retired: set[int] = set()
    for choice in choices:
        worker, act = choice % workers, choice // workers % 4
        held = leases.held(worker)
        if act < 2:
            leases.take(worker, 1 + act)
        elif act == 2 and held:
            leases.retire(worker, held[-1:])
            retired.add(held[-1])
        elif act == 3:
            leases.give_back(worker)
        assert leases.floor == min(set(range(leases.total)) - retired, default=leases.total)
