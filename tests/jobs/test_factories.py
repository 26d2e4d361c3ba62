"""What a user gives as model makes learners on the engine's device, or the run is refused before it begins."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.data.load import split
from paragrad.jobs.factories import check_device, learner_factory, made_on
from paragrad.laws.bowl import Bowl
from tests.engines.sim.simulated import network, rows

ENGINES = [pg.Local(workers=2), pg.Vector(workers=2), pg.Network(workers=2, here=2)]
NO_PARAMETER = "has no parameter device: its learner would compute elsewhere"


def learner(device="cpu"):
    return pg.TorchLearner(network(torch.float32), nn.CrossEntropyLoss(), "sgd:lr=0.1", device=device)


class Recorded:
    """Devices that learners were asked for; all are made on the CPU, so that no GPU is needed."""

    def __init__(self):
        self.asked = []

    def by_name(self, device):
        self.asked.append(device)
        return Bowl()

    def by_keyword(self, *, device="cpu"):
        return self.by_name(device)

    def by_any(self, **options):
        return self.by_name(options["device"])

    def without(self):
        self.asked.append(None)
        return Bowl()


@pytest.mark.parametrize("kind", ["by_name", "by_keyword", "by_any"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_a_function_that_takes_a_device_is_given_it(kind, device):
    recorded = Recorded()
    made_on(device, getattr(recorded, kind))
    made_on(device, functools.partial(getattr(recorded, kind)))
    assert recorded.asked == [device, device]


def test_one_that_takes_none_is_for_the_cpu_alone():
    recorded = Recorded()
    made_on("cpu", recorded.without)
    with pytest.raises(pg.UsageError, match=f"device='cuda', but .* {NO_PARAMETER}"):
        made_on("cuda", recorded.without)
    assert recorded.asked == [None]


def on(engine, device):
    """The same engine on another device: 'meta' is one that torch has without a GPU."""
    return replace(engine, device=device)


def run(make, engine, tmp_path):
    options = {"scheme": pg.AGN(window=2), "batch_size": 16, "run": pg.Run(tmp_path / "run")}
    return pg.train(make, rows(64, torch.float32), engine=engine, **options)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
def test_every_engine_refuses_it_before_the_run(engine, tmp_path):
    with pytest.raises(pg.UsageError, match=f"device='meta', but .* {NO_PARAMETER}"):
        run(lambda: learner(), on(engine, "meta"), tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
def test_every_engine_finds_that_a_device_was_not_passed_on(engine, tmp_path):
    with pytest.raises(pg.UsageError, match="asked for a learner on 'meta', but returned one on 'cpu'"):
        run(lambda device: learner(), on(engine, "meta"), tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: type(engine).__name__)
def test_every_engine_gives_the_device_of_its_workers(engine, tmp_path):
    def make(device):
        assert device == "cpu"
        return learner(device)

    assert run(make, engine, tmp_path).summary["steps"] == 4


def test_the_device_reaches_a_learner_that_carries_frozen_parameters():
    class Averaged(nn.Linear):
        def __init__(self):
            super().__init__(5, 3)
            self.average = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x):
            out = super().forward(x)
            if self.training:
                with torch.no_grad():
                    self.average.lerp_(out.mean(0), 0.1)
            return out

    asked = []

    def make(device="cpu"):
        asked.append(device)
        return pg.TorchLearner(Averaged(), nn.CrossEntropyLoss(), "sgd:lr=0.1", device="cpu")

    notes = []
    source = split(rows(64, torch.float32))
    factory = learner_factory(make, None, None, None, source, pg.AGN(), notes)
    assert notes
    with pytest.raises(pg.UsageError, match="asked for a learner on 'meta', but returned one on 'cpu'"):
        check_device(factory, "meta")
    assert asked[-1] == "meta"


def test_what_was_trained_is_loaded_by_a_function_that_takes_a_device(tmp_path):
    result = run(lambda device: learner(device), pg.Vector(2), tmp_path)
    again = pg.load(tmp_path / "run", model=lambda device: learner(device))
    for mine, theirs in zip(again.module.module.parameters(), result.model.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)
