"""BackupWorkers: the mean of the first n - b gradients, and what becomes of the others."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

import paragrad as pg
from tests.conftest import train
from tests.schemes.golden import center_of, close, commit, serial, vector


def test_the_center_steps_on_the_first_gradients_weighted_by_rows():
    center = center_of(pg.BackupWorkers(), workers=3)
    assert commit(center, 2, (4.0, 0.0, 8.0), weight=1.0) == {}
    replies = commit(center, 0, (0.0, 4.0, 0.0), weight=3.0)
    assert set(replies) == {0, 2}
    assert close(center.value, vector(1.0 - 0.1, 2.0 - 0.3, 3.0 - 0.2))


def test_a_late_gradient_is_dropped_and_its_rows_are_done_again_from_the_new_center():
    center = center_of(pg.BackupWorkers(), workers=3)
    late = center.leases.held(1)
    commit(center, 0, (1.0, 1.0, 1.0))
    commit(center, 2, (1.0, 1.0, 1.0))
    before = center.value.clone()
    reply = commit(center, 1, (9.0, 9.0, 9.0))[1]
    assert torch.equal(center.value, before)
    assert (reply.applied, reply.batches, reply.version) == (False, late, 1)
    assert torch.equal(reply.value, before)
    assert center.ledger.counts.dropped == 1


def test_two_backups_of_three_workers_leave_a_quorum_of_one():
    center = center_of(pg.BackupWorkers(backups=2), workers=3)
    commit(center, 1, (1.0, 0.0, 0.0))
    assert close(center.value, vector(0.9, 2.0, 3.0))


@pytest.mark.parametrize("seed", range(3))
def test_without_backups_it_is_syncsgd_to_the_bit(seed):
    ends = [
        serial(scheme, 3, choose=random.Random(seed).choice).run().value
        for scheme in (pg.BackupWorkers(backups=0), pg.SyncSGD())
    ]
    assert torch.equal(*ends)


def test_every_row_is_used_once_though_a_slow_worker_is_often_late():
    run = serial(pg.BackupWorkers(), 3, choose=min)
    run.run()
    assert run.center.ledger.counts.dropped > 0
    used = Counter(position for done in run.applied for position in done.batches)
    assert used == Counter(range(run.job.plan.positions))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pg.BackupWorkers(backups=-1), "backups=-1"),
        (lambda: pg.BackupWorkers(window=2), "window=2.*leave window at 1"),
        (lambda: pg.BackupWorkers(bound=1), "a bound on staleness has no meaning"),
        (lambda: pg.BackupWorkers().quorum(1), r"backups=1 with workers=1.*at most n - 1, here 0"),
        (lambda: pg.BackupWorkers(backups=4).quorum(3), r"backups=4 with workers=3.*here 2"),
    ],
)
def test_a_bad_value_is_refused_with_the_remedy(make, said):
    with pytest.raises(pg.UsageError, match=said):
        make()


def test_a_run_with_too_many_backups_does_not_begin(model, rows, tmp_path):
    with pytest.raises(pg.UsageError, match=r"backups=2 with workers=2.*at most n - 1, here 1"):
        train(model, rows, tmp_path / "run", scheme=pg.BackupWorkers(backups=2), engine=pg.Local(workers=2))
