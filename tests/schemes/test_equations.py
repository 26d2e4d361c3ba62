"""What the equations of the first six schemes say on three numbers."""

from __future__ import annotations

import torch

import paragrad as pg
from paragrad.core.replica import Replica
from paragrad.schemes.traits import pulls_before_commit
from paragrad.types import Reply
from tests.schemes.golden import center_of, commit, near


def test_downpour_adds_the_movement():
    center = center_of(pg.Downpour())
    replies = commit(center, 1, [0.5, -1.0, 0.25])
    assert center.value.tolist() == [1.5, 1.0, 3.25]
    assert replies[1].value.tolist() == [1.5, 1.0, 3.25]


def test_agn_divides_by_the_steps_really_made():
    center = center_of(pg.AGN(window=4))
    commit(center, 0, [2.0, -4.0, 1.0], steps=4)
    assert center.value.tolist() == [1.5, 1.0, 3.25]
    commit(center, 0, [2.0, -4.0, 1.0], sequence=2, steps=2)
    assert center.value.tolist() == [2.5, -1.0, 3.75]


def test_syncsgd_steps_once_on_the_mean_weighted_by_rows():
    center = center_of(pg.SyncSGD())
    assert commit(center, 1, [4.0, 0.0, 8.0], weight=1.0) == {}
    replies = commit(center, 0, [0.0, 4.0, 0.0], weight=3.0)
    assert near(center.value, 1.0 - 0.1, 2.0 - 0.3, 3.0 - 0.2)
    assert set(replies) == {0, 1}
    assert center.clock == 1


def test_model_averaging_is_the_mean_weighted_by_steps():
    center = center_of(pg.ModelAveraging(window=3))
    commit(center, 0, [0.0, 0.0, 4.0], steps=3)
    commit(center, 1, [4.0, 8.0, 0.0], steps=1)
    assert center.value.tolist() == [1.0, 2.0, 3.0]


def test_the_atomic_elastic_force_uses_the_center_as_it_is():
    center = center_of(pg.AEASGD(window=1, alpha=0.5))
    replies = commit(center, 0, [3.0, 2.0, 1.0])
    assert replies[0].value.tolist() == [1.0, 0.0, -1.0]
    assert center.value.tolist() == [2.0, 2.0, 2.0]
    replies = commit(center, 1, [4.0, 0.0, 2.0])
    assert replies[1].value.tolist() == [1.0, -1.0, 0.0]
    assert center.value.tolist() == [3.0, 1.0, 2.0]


def test_the_worker_gives_up_what_the_center_takes():
    scheme = pg.AEASGD(window=1, alpha=0.5)
    me = Replica(torch.tensor([3.0, 2.0, 1.0]))
    scheme.adopt(me, Reply(worker=0, sequence=1, version=1, value=torch.tensor([1.0, 0.0, -1.0])))
    assert me.local.tolist() == [2.0, 2.0, 2.0]


def test_the_thesis_form_commits_the_force_from_the_pulled_center():
    scheme = pg.AEASGD(window=1, alpha=0.5, atomic=False)
    me = Replica(torch.tensor([3.0, 2.0, 1.0]))
    me.center = torch.tensor([1.0, 1.0, 1.0])
    assert scheme.commit(me).tolist() == [1.0, 0.5, 0.0]
    assert pulls_before_commit(scheme)


def test_diloco_makes_an_outer_nesterov_step():
    center = center_of(pg.DiLoCo(window=1, outer_lr=0.5, outer_momentum=0.5))
    for round_, expected in ((1, [1.0 + 0.5 * 1.5, 2.0, 3.0]), (2, [1.75 + 0.5 * (1 + 0.5 * 1.5), 2.0, 3.0])):
        commit(center, 0, [2.0, 0.0, 0.0], sequence=round_, version=round_ - 1)
        commit(center, 1, [0.0, 0.0, 0.0], sequence=round_, version=round_ - 1)
        assert near(center.value, *expected)
