"""The center is killed, by SIGKILL, and started again: its workers go on by themselves, and nothing is lost or done twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

import paragrad as pg
from paragrad.schemes.traits import name_of
from tests.engines.net.kills import check_sound, kill_the_center, same_bits
from tests.engines.net.victim import Task

EXACT = [
    Task(pg.SyncSGD(), workers=2, batches=60, sleep=0.05, optimizer="adam:lr=0.01", engine={"threads": 1}),
    Task(pg.AEASGD(window=2), workers=1, batches=60, sleep=0.05, optimizer="adam:lr=0.01", engine={"threads": 1}),
    Task(pg.DCASGD(), workers=1, batches=40, sleep=0.05, optimizer="sgd:lr=0.1", engine={"threads": 1}),
]
"""Runs that have one order only, and so end on the same bits whatever becomes of the center."""


@pytest.mark.parametrize("task", EXACT, ids=lambda task: name_of(task.scheme))
def test_a_run_whose_center_was_killed_ends_on_the_bits_of_one_whose_was_not(task, tmp_path):
    scene = kill_the_center(task, tmp_path / "killed", kills=2, seed=4)
    figures = check_sound(scene)
    print(f"{name_of(task.scheme)}: {scene.kills} kills, {figures}")
    whole = replace(task, sleep=0.0).train(tmp_path / "whole", pg.Local(workers=task.workers, threads=1))
    assert same_bits(scene.out, whole.directory)
    again = pg.replay(
        scene.out, task.model(), task.rows(), loss=task.loss, optimizer=task.optimizer, scheme=task.scheme, tolerance=0.0
    )
    assert again.equal


def test_asynchronous_workers_lose_no_acknowledged_commit_when_their_center_is_killed(tmp_path):
    task = Task(pg.AGN(window=2), workers=3, batches=150, counting=2000, sleep=0.02)
    scene = kill_the_center(task, tmp_path / "killed", kills=2, seed=5)
    print(f"{scene.kills} kills, {check_sound(scene)}")
