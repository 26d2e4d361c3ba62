"""Residuals and private states of workers, as far as the center knows them."""

from __future__ import annotations

import torch

from paragrad.core.private import PrivateStates
from paragrad.types import Commit


def commit(worker: int, **fields) -> Commit:
    return Commit(worker, 1, 0, torch.empty(0), 1, **fields)


def test_a_commit_that_brings_nothing_makes_what_was_known_unknown():
    known = PrivateStates(kept=True)
    known.restored[0] = {"counters": torch.zeros(1)}
    known.applied(commit(0, residual=torch.ones(1), state={"counters": torch.ones(1)}))
    assert (known.residuals.keys(), known.states.keys(), known.restored) == ({0}, {0}, {})
    known.applied(commit(0))
    assert (known.residuals, known.states) == ({}, {})


def test_a_newcomer_takes_the_residual_of_the_last_commit_that_counts_or_will():
    known = PrivateStates(kept=True)
    known.residuals[0] = torch.tensor([1.0])
    assert known.residual(0, []) is known.residuals[0]
    waits = torch.tensor([2.0])
    assert known.residual(0, [commit(0, residual=waits)]) is waits
    assert known.residual(0, [commit(0)]) is None, "of a commit that waits, nothing is known"
    assert known.residual(1, []) is None
