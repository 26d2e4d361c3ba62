"""Hogwild: the workers' weights are the center."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import paragrad as pg
from paragrad.core.job import Job
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial
from paragrad.laws.bowl import Bowl
from tests.conftest import Watch, every_batch_once, train
from tests.schemes.golden import START, close, parameters_of, serial, slope, trained_alone, vector


def three_numbers(device):
    return Bowl(lr=0.1, weights=vector(*START), curvature=torch.ones(3, dtype=torch.float64))


def test_a_step_stands_in_the_center_before_it_is_reported_and_the_next_worker_reads_it():
    rows = Arrays(torch.zeros(8, 3, dtype=torch.float64))
    run = Serial(Job(pg.Hogwild(), three_numbers, rows, None, Plan(8, 2, 1, 0), 8), 2)
    seen, receive = [], run.center.receive

    def listening(message):
        seen.append((message.worker, message.value.numel(), run.center.clock, run.center.value.clone()))
        return receive(message)

    run.center.receive = listening
    run.run(commits=2)
    assert [what[:3] for what in seen] == [(0, 0, 0), (1, 0, 1)]
    assert close(seen[0][3], vector(0.9, 1.8, 2.7))
    assert close(seen[1][3], vector(0.81, 1.62, 2.43))


def test_workers_in_turn_are_plain_training_in_the_order_of_their_steps():
    run = serial(pg.Hogwild(), 3)
    run.run()
    weights = Bowl().weights
    for done in run.applied:
        for position in done.batches:
            weights = weights - 0.05 * slope(run, position, weights)
    assert close(run.center.value, weights)


@pytest.mark.parametrize("window", [1, 4])
def test_one_worker_is_plain_training_across_processes(window, model, rows, tmp_path):
    x, y = rows
    result = train(
        model.double(), (x.double(), y), tmp_path / "run", scheme=pg.Hogwild(window=window), engine=pg.Local(workers=1)
    )
    alone = trained_alone(model, x.double(), y, epochs=4)
    assert all(close(mine, theirs) for mine, theirs in zip(parameters_of(result), alone, strict=True))


def test_processes_write_into_the_same_weights(model, rows, tmp_path):
    result = train(model, rows, tmp_path / "run", holdout=0.2, scheme=pg.Hogwild(window=2), engine=pg.Local(workers=3))
    assert every_batch_once(result.directory, 40 * 4)
    assert result.accuracy > 0.8
    assert result.summary["commits"] >= 80


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_that_cannot_share_its_weights_is_refused(device, model, rows, tmp_path):
    made = model if device == "cuda" else partial(Bowl, aliasable=False)
    data = rows if device == "cuda" else torch.zeros(40, 7, dtype=torch.float64)
    with pytest.raises(pg.UsageError, match=r"workers of Hogwild share their weights.*device='cpu'"):
        train(made, data, tmp_path / "run", scheme=pg.Hogwild(), engine=pg.Local(workers=2, device=device))
    assert not (tmp_path / "run").exists()


def test_a_model_of_two_types_cannot_share_its_weights(model, rows, tmp_path):
    x, y = rows
    with pytest.raises(pg.UsageError, match="must be of one type"):
        train(model.bfloat16(), (x.bfloat16(), y), tmp_path / "run", scheme=pg.Hogwild())


def test_shared_weights_that_become_nan_end_the_run_as_diverged(model, rows, tmp_path):
    watch = Watch()
    with pytest.raises(pg.Diverged, match="Lower the learning rate"):
        train(model, rows, tmp_path / "run", watch, scheme=pg.Hogwild(), optimizer="sgd:lr=1e38")
    assert not list((tmp_path / "run" / "checkpoints").glob("*")), "nobody could go on from it"
    last = [event for event in watch.events if event.kind == "note"][-1]
    assert "No checkpoint is written, because the center has diverged" in last.data["message"]
