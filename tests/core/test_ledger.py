"""The ledger: what each incarnation of a worker has sent, and what became of it."""

from __future__ import annotations

import pytest
import torch

from paragrad.core.ledger import Ledger
from paragrad.types import Commit


def commit(worker: int, sequence: int = 1, **fields) -> Commit:
    return Commit(worker, sequence, 0, torch.empty(0), fields.pop("steps", 2), **fields)


def test_an_older_incarnation_is_replaced_and_the_present_one_is_not():
    ledger = Ledger(2)
    ledger.joins(1, 3, least=0)
    assert ledger.is_replaced(commit(1, incarnation=2))
    assert not ledger.is_replaced(commit(1, incarnation=3))
    assert not ledger.is_replaced(commit(0, incarnation=0))
    ledger.joins(1, 1, least=0)  # one that comes late does not make the number smaller
    assert ledger.is_replaced(commit(1, incarnation=2))


def test_rejected_sequences_are_forgotten_when_another_incarnation_joins():
    ledger = Ledger(1)
    ledger.rejected[0] = 4
    assert ledger.is_rejected(commit(0, sequence=4))
    assert not ledger.is_rejected(commit(0, sequence=5))
    ledger.joins(0, 1, least=0)
    assert not ledger.is_rejected(commit(0, sequence=4))


def test_a_newcomer_counts_as_far_as_the_slowest_and_never_back():
    ledger = Ledger(2)
    ledger.joins(0, 0, least=5)
    ledger.joins(0, 1, least=2)
    assert ledger.commits == [5, 0]


def test_applied_commits_are_counted_with_the_speed_of_their_worker():
    ledger = Ledger(2)
    ledger.applied(commit(1, steps=4, rows=32, seconds=2.0))
    assert ledger.speeds == [0.0, 2.0]
    ledger.applied(commit(1, sequence=2, steps=4, rows=32, seconds=1.0))
    assert ledger.speeds[1] == pytest.approx(3.0)  # half of what it was, half of what it is
    ledger.applied(commit(1, sequence=3, steps=1, rows=8))  # of no duration nothing is learnt
    assert ledger.speeds[1] == pytest.approx(3.0)
    assert (ledger.counts.commits, ledger.counts.steps, ledger.counts.rows) == (3, 9, 72)
    assert ledger.commits == [0, 3]


def test_refusals_count_in_a_row():
    ledger = Ledger(1)
    assert [ledger.refused(0), ledger.refused(0)] == [1, 2]
    ledger.applied(commit(0))
    assert ledger.refused(0) == 1
    assert ledger.counts.refused == 3
