"""Replies that are owed: who waits, who rests, who sits a round out, what is given again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import paragrad as pg
from paragrad.core.center import Center
from paragrad.data.leases import Leases
from paragrad.types import Commit, Reply


def center(scheme: pg.Scheme, workers: int, batches: int, *, stolen: bool = False) -> Center:
    leases = Leases(batches=batches, epochs=1, workers=workers, stolen=stolen)
    optimizer = torch.nn.Identity() if scheme.ships == "gradient" else None
    assert optimizer is None
    return Center(scheme, torch.zeros(2), workers=workers, leases=leases)


def commit(reply: Reply, sequence: int = 1, value: float = 1.0) -> Commit:
    vector = torch.full((2,), value)
    return Commit(reply.worker, sequence, reply.version, vector, max(1, len(reply.batches)), batches=reply.batches)


def test_a_repeated_commit_gets_the_same_reply_again_and_changes_nothing():
    made = center(pg.AGN(window=2), 2, 8, stolen=True)
    [first] = made.join(0)
    made.join(1)
    [reply] = made.receive(commit(first))
    value, clock, leased = reply.value.clone(), made.clock, reply.batches
    [again] = made.receive(commit(first))
    assert torch.equal(again.value, value)
    assert (again.version, again.batches, again.last) == (reply.version, leased, 1)
    assert (made.clock, made.ledger.counts.duplicates) == (clock, 1)


def test_a_worker_without_rows_rests_until_another_leaves_some():
    made = center(pg.Downpour(), 2, 2, stolen=True)
    [one] = made.join(0)
    [two] = made.join(1)
    assert made.receive(commit(one)) == [], "there is nothing to do for it, but rows are still out"
    assert list(made.replies.resting) == [0]
    [reply] = made.leave(1)
    assert (reply.worker, reply.batches) == (0, two.batches)
    assert made.replies.resting == {}


def test_all_are_done_when_the_last_row_is_used():
    made = center(pg.Downpour(), 2, 2, stolen=True)
    [one], [two] = made.join(0), made.join(1)
    made.receive(commit(one))
    replies = made.receive(commit(two))
    assert sorted(reply.worker for reply in replies) == [0, 1]
    assert all(reply.done for reply in replies)
    assert made.live == set()


def test_a_bound_withholds_the_reply_of_a_worker_that_is_too_far_ahead():
    made = center(pg.Downpour(bound=1), 2, 20, stolen=True)
    [reply], [slow] = made.join(0), made.join(1)
    [reply] = made.receive(commit(reply, 1))
    assert made.receive(commit(reply, 2)) == []
    released = made.receive(commit(slow, 1))
    assert sorted(r.worker for r in released) == [0, 1]


@dataclass(frozen=True)
class Alternating(pg.Scheme):
    """c <- c + d; worker 1 waits while the clock is odd."""

    def scale(self, commit):
        return 1.0

    def steps(self, center, worker):
        return 0 if worker == 1 and center.clock % 2 else self.window


def test_a_window_of_0_steps_makes_a_worker_wait_until_the_center_has_moved_on():
    made = center(Alternating(), 2, 20, stolen=True)
    [zero], [one] = made.join(0), made.join(1)
    assert [r.worker for r in made.receive(commit(one))] == [], "the clock is 1: worker 1 waits"
    assert sorted(r.worker for r in made.receive(commit(zero))) == [0, 1]


def test_a_rejected_commit_gives_its_rows_back_with_the_center_as_it_is():
    made = center(pg.AGN(window=2), 1, 4)
    [first] = made.join(0)
    [reply] = made.receive(commit(first, value=float("nan")))
    assert (reply.applied, reply.batches, made.clock) == (False, first.batches, 0)
    [better] = made.receive(commit(reply, 2))
    assert better.applied
    assert [made.receive(commit(first)), made.ledger.counts.duplicates] == [[], 1], "the rejected one came before"


def test_a_newcomer_waits_for_the_round_that_its_predecessors_commit_is_in():
    made = center(pg.ModelAveraging(window=1), 2, 6)
    [zero], [one] = made.join(0), made.join(1)
    assert made.receive(commit(zero)) == []
    assert made.join(0, 1) == []
    replies = {reply.worker: reply for reply in made.receive(commit(one))}
    assert (replies[0].sequence, replies[0].last) == (-2, 1)
    assert replies[1].sequence == 1


@pytest.mark.parametrize("workers", [2, 3])
def test_an_uneven_end_of_an_epoch_ends(workers):
    """A worker without a mini-batch in the last round stays idle, and all end."""
    made = center(pg.ModelAveraging(window=1), workers, 4)
    waiting = {r.worker: r for rank in range(workers) for r in made.join(rank)}
    sequences = dict.fromkeys(range(workers), 0)
    used: list[int] = []
    while waiting:
        worker = min(waiting)
        reply = waiting.pop(worker)
        if reply.done and not reply.batches:
            continue
        sequences[worker] += 1
        used += reply.batches
        waiting |= {r.worker: r for r in made.receive(commit(reply, sequences[worker]))}
    assert sorted(used) == [0, 1, 2, 3]
