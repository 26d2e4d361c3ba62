"""Downpour's zealous form: a window ends as soon as the center has nothing to do."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import chain, cycle, repeat

import pytest
import torch

import paragrad as pg
from paragrad.engines.serial import Serial
from paragrad.schemes.traits import is_scaled_movement
from tests.conftest import Watch, every_batch_once, train
from tests.schemes.golden import close, parameters_of, serial, trained_alone


@dataclass
class _Queued(Serial):
    """A center that has a queue after the steps for which this is true."""

    def __post_init__(self) -> None:
        self.queue = cycle([True])
        super().__post_init__()

    def _make(self, rank, incarnation=0):
        actor = super()._make(rank, incarnation)
        window = actor.window
        actor.window = lambda request: replace(window(request), busy=next(self.queue))
        return actor


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_on_an_idle_center_zealous_is_a_window_of_1_to_the_bit(workers):
    zealous, plain = serial(pg.Downpour(window=5, zealous=True), workers), serial(pg.Downpour(window=1), workers)
    assert torch.equal(zealous.run().value, plain.run().value)
    assert {done.steps for done in zealous.applied} == {1}


def test_on_a_center_that_is_always_busy_zealous_is_the_whole_window_to_the_bit():
    zealous = serial(pg.Downpour(window=5, zealous=True), 2, kind=_Queued)
    assert torch.equal(zealous.run().value, serial(pg.Downpour(window=5), 2).run().value)


def test_a_window_ends_at_the_first_step_that_finds_the_center_idle():
    run = serial(pg.Downpour(window=4, zealous=True), 1, kind=_Queued)
    run.queue = chain([True, False, False, True, True, False], repeat(True))
    run.run(commits=5)
    assert [done.steps for done in run.applied] == [2, 1, 3, 4, 4]


def test_without_zeal_the_queue_does_not_matter():
    run = serial(pg.Downpour(window=4), 1, kind=_Queued)
    run.queue = repeat(False)
    run.run(commits=3)
    assert [done.steps for done in run.applied] == [4, 4, 4]


def test_a_zealous_exchange_is_still_one_pass():
    assert is_scaled_movement(pg.Downpour(window=4, zealous=True))


def test_one_zealous_worker_is_plain_training_across_processes(model, rows, tmp_path):
    x, y = rows
    watch, scheme = Watch(), pg.Downpour(window=4, zealous=True)
    result = train(model.double(), (x.double(), y), tmp_path / "run", watch, scheme=scheme, engine=pg.Local(workers=1))
    alone = trained_alone(model, x.double(), y, epochs=4)
    assert all(close(mine, theirs) for mine, theirs in zip(parameters_of(result), alone, strict=True))
    assert steps_of(watch) == {1}, "a lone worker never finds a queue"


def test_a_queue_at_a_real_center_makes_windows_longer(model, rows, tmp_path):
    def dawdle(event):
        if event.kind == "commit":
            time.sleep(0.01)

    watch = Watch()
    run = pg.Run(out=tmp_path / "run", callbacks=(watch, dawdle))
    scheme, engine = pg.Downpour(window=4, zealous=True), pg.Local(workers=3)
    result = pg.train(model, rows, scheme=scheme, engine=engine, optimizer="sgd:lr=0.01", batch_size=8, epochs=4, run=run)
    assert every_batch_once(result.directory, 50 * 4)
    assert max(steps_of(watch)) > 1


def steps_of(watch):
    return {event.data["steps"] for event in watch.events if event.kind == "commit"}
