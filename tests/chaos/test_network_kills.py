"""Centers and workers of the network engine killed by the dozen, and a line cut for ten seconds.

Run with ``make chaos``; ``-s`` shows the figures.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import paragrad as pg
from paragrad.schemes.traits import name_of
from tests.engines.net.kills import check_sound, kill_the_center, kill_workers, same_bits
from tests.engines.net.victim import Task
from tests.engines.transport.test_connection import cut_off

pytestmark = pytest.mark.chaos

CENTERS = [
    (Task(pg.SyncSGD(), workers=2, batches=1500, sleep=0.05, optimizer="adam:lr=0.01"), 16),
    (Task(pg.AEASGD(window=2), workers=1, batches=1500, sleep=0.05, optimizer="adam:lr=0.01"), 14),
    (Task(pg.DCASGD(), workers=1, batches=1500, sleep=0.05, optimizer="sgd:lr=0.1"), 12),
    (Task(pg.AGN(window=2), workers=3, batches=3000, counting=100_000, sleep=0.05), 14),
]


@pytest.mark.parametrize(
    ("task", "kills"), CENTERS, ids=lambda value: name_of(value.scheme) if isinstance(value, Task) else str(value)
)
def test_a_center_killed_again_and_again_loses_and_doubles_nothing(task, kills, tmp_path):
    scene = kill_the_center(task, tmp_path / "killed", kills=kills, seed=kills)
    figures = check_sound(scene)
    print(f"{name_of(task.scheme)}: the center was killed {scene.kills} times; acknowledged {figures['acknowledged']}, "
          f"lost {figures['lost']}, doubled {figures['doubled']}")  # fmt: skip
    if task.workers == 1 or task.scheme.quorum(task.workers) == task.workers:
        whole = replace(task, sleep=0.0).train(tmp_path / "whole", pg.Local(workers=task.workers, threads=1))
        assert same_bits(scene.out, whole.directory)
        print(f"{name_of(task.scheme)}: the same bits as a run whose center was never killed")


@pytest.mark.parametrize("scheme", [pg.AGN(window=2), pg.AEASGD(window=2), pg.SyncSGD()], ids=name_of)
def test_workers_killed_and_stopped_again_and_again_cost_no_row(scheme, tmp_path):
    task = Task(scheme, workers=4, batches=6000, counting=100_000, sleep=0.05, engine={"replace_after": 1.0})
    scene, figures = kill_workers(task, tmp_path / "killed", kills=18, stops=3, seed=7)
    found = check_sound(scene)
    print(f"{name_of(scheme)}: 18 workers killed, 3 stopped; acknowledged {found['acknowledged']}, lost {found['lost']}, "
          f"doubled {found['doubled']}; a replacement had trained after {figures['replaced after']:.1f} s at most (asked: 5), "
          f"longest gap of a worker {figures['gap']:.1f} of its median (asked: 3 for asynchronous ones)")  # fmt: skip


@pytest.mark.parametrize("how", ["dark", "broken"])
def test_a_line_cut_for_ten_seconds(how, tmp_path):
    print(f"{how}: {cut_off(tmp_path, how, seconds=10.0, replace_after=5.0)}")
