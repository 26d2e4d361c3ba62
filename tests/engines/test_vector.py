"""The vector engine is exact: whatever is computed together, and when, is what one worker after another would compute."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.engines.serial import Serial
from paragrad.learners.batchable import why_not
from paragrad.learners.rows import Task, TorchRows
from paragrad.schemes.traits import is_shared, name_of, pull_every
from tests.engines.sim.simulated import WORKERS, in_this_order, job_of, network, rows, simulate
from tests.laws.table import TABLE

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = [scheme for scheme, _ in TABLE if not is_shared(scheme) and scheme.quorum(WORKERS) <= WORKERS]
JITTER = pg.Cluster(speeds=(pg.LogNormal(1.0, 0.5), 0.7, pg.Exponential(1.3), 1.9))
ROUGH = pg.Cluster(
    speeds=pg.LogNormal(1.0, 0.4),
    latency=pg.Exponential(0.2),
    bandwidth=4000.0,
    center_rate=20.0,
    faults=(
        pg.Crash(worker=1, at=6.3, down=2.0),
        pg.Crash(worker=2, at=11.1, down=9.0),
        pg.Pause(worker=0, at=8.0, seconds=3.0),
        pg.Slow(worker=3, at=4.0, factor=3.0, seconds=5.0),
        pg.DropMessage(worker=0, at=3.0),
        pg.DropMessage(worker=3, at=9.0, answer=True),
        pg.DuplicateMessage(worker=2, at=2.0),
        pg.Partition(workers=(0, 1), at=14.0, seconds=2.0),
        pg.CenterCrash(at=17.0, down=1.5),
    ),
)
OPTIMIZERS = [
    "sgd:lr=0.1,momentum=0.8",
    "sgd:lr=0.1,momentum=0.8,nesterov=true",
    "sgd:lr=0.1,momentum=0.8,dampening=0.3,weight_decay=0.01",
    "adagrad:lr=0.05,lr_decay=0.1,initial_accumulator_value=0.1",
    "rmsprop:lr=0.01,centered=true,momentum=0.5",
    "rmsprop:lr=0.01",
    "adadelta:lr=0.5,weight_decay=0.01",
    "adam:lr=0.01",
    "adam:lr=0.01,amsgrad=true,weight_decay=0.1",
    "adamw:lr=0.01",
    "adam:lr=0.01,maximize=true",
]


def optimizer_for(scheme):
    return "sgd:lr=0.05" if scheme.plain_sgd or scheme.ships == "gradient" else "adam:lr=0.005"


def same(a, b, within=1e-10):
    return torch.allclose(a, b, atol=within, rtol=0)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_every_scheme_is_the_plain_loop_in_the_same_order(scheme):
    job = job_of(scheme, optimizer=optimizer_for(scheme), epochs=8)
    simulation = simulate(job, cluster=JITTER)
    loop = simulate(job, cluster=JITTER, together=False)
    assert simulation.order == loop.order
    assert same(simulation.center.value, loop.center.value)
    if scheme.quorum(WORKERS) == 1 and not (scheme.bound or scheme.early or scheme.overlap or pull_every(scheme)):
        assert len(simulation.order) * scheme.window >= 200
        serial = in_this_order(job, simulation.order)
        serial.run(len(simulation.order))
        assert same(simulation.center.value, serial.center.value)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_it_makes_no_difference_when_windows_are_computed(scheme):
    job = job_of(scheme, optimizer=optimizer_for(scheme), epochs=2)
    lazy = simulate(job, cluster=ROUGH)
    chance = random.Random(1)
    for moment in (lambda: True, lambda: chance.random() < 0.3):
        other = simulate(job, cluster=ROUGH, moment=moment)
        assert other.order == lazy.order
        assert same(other.center.value, lazy.center.value)
    alone = simulate(job, cluster=ROUGH, together=False)
    assert alone.order == lazy.order
    assert same(alone.center.value, lazy.center.value)
    assert sorted(p for _, _, batches in lazy.order for p in batches) == list(range(job.plan.positions))


@pytest.mark.parametrize(
    "scheme", [pg.SyncSGD(), pg.ModelAveraging(window=3), pg.EASGD(window=2), pg.DiLoCo(window=3)], ids=repr
)
def test_a_synchronous_scheme_ends_at_the_same_bits_at_any_speeds(scheme):
    job = job_of(scheme, optimizer=optimizer_for(scheme), epochs=2)
    plain = Serial(job, WORKERS)
    plain.run()
    ends = [simulate(job, cluster=cluster).center.value for cluster in (pg.Cluster(), pg.Cluster(speeds=(1.0, 2.0, 7.0, 0.1)))]
    assert torch.equal(*ends)
    assert same(ends[0], plain.center.value)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_local_optimisers_step_row_by_row_as_torch_does(optimizer):
    job = job_of(pg.AGN(window=4), optimizer=optimizer)
    assert same(simulate(job, cluster=ROUGH).center.value, simulate(job, cluster=ROUGH, together=False).center.value)


@pytest.mark.parametrize("optimizer", ["adam:lr=0.01,weight_decay=0.1", "adamw:lr=0.01", "adam:lr=0.01,maximize=true"])
def test_the_kernel_that_a_gpu_uses_makes_the_same_step(optimizer):
    job = job_of(pg.AGN(window=4), optimizer=optimizer)
    kinds = []
    for fused in (False, True):
        rows_ = TorchRows(job.make_learner("cpu"), 3, job.train, job.plan)
        if fused:
            rows_._stepper._device = SimpleNamespace(type="cuda")
        for start in (0, 6):
            rows_.run([Task(row, (start + row, start + row + 3)) for row in range(3)])
        kinds.append(rows_.weights.clone())
    assert same(*kinds)


@pytest.mark.parametrize("scheme", [pg.AGN(window=4), pg.SyncSGD(), pg.AEASGD(window=2)], ids=repr)
def test_in_float32_it_stays_close_over_twenty_events(scheme):
    job = job_of(scheme, optimizer="sgd:lr=0.1", dtype=torch.float32, epochs=-(-20 * scheme.window // 29))
    together, alone = simulate(job, cluster=JITTER), simulate(job, cluster=JITTER, together=False)
    assert len(together.order) >= 20
    assert same(together.center.value, alone.center.value, within=1e-5)


@pytest.mark.parametrize("chunk", [1, 3])
def test_rows_may_be_computed_in_chunks(chunk):
    job = job_of(pg.AGN(window=3), optimizer="adam:lr=0.01")
    assert same(simulate(job, cluster=JITTER, chunk=chunk).center.value, simulate(job, cluster=JITTER).center.value)


def test_batch_norm_statistics_and_counters_travel_with_their_rows():
    # Without a bias before the batch-norm: its gradient is rounding alone, which Adam would blow up.
    module = nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    job = job_of(pg.AGN(window=3), module=module, optimizer="adam:lr=0.01")
    together, alone = (simulate(job, cluster=ROUGH, together=together).center.state for together in (True, False))
    assert same(together.value, alone.value)
    assert same(together.buffers, alone.buffers)
    assert torch.equal(together.integers, alone.integers)


class Tied(nn.Module):
    """One weight in a linear layer and, transposed, outside of it; and one layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.inside, self.shared, self.out = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(5, 3)

    def forward(self, x):
        hidden = torch.tanh(self.shared(torch.tanh(self.shared(torch.tanh(self.inside(x))))))
        return self.out(torch.tanh(hidden @ self.inside.weight))


@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", "adam:lr=0.01"])
def test_a_weight_that_is_used_twice_gets_both_gradients(optimizer):
    torch.manual_seed(4)
    job = job_of(pg.AGN(window=3), module=Tied().double(), optimizer=optimizer)
    learner = job.make_learner("cpu")
    assert why_not(learner, job.train, job.plan) is None
    assert same(simulate(job, cluster=JITTER).center.value, simulate(job, cluster=JITTER, together=False).center.value)


@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", "adam:lr=0.01"])
def test_a_convolution_beside_linear_layers_is_that_of_the_loop(optimizer):
    torch.manual_seed(5)
    body = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(10, 3))
    job = job_of(pg.AGN(window=3), module=body.double(), optimizer=optimizer)
    assert same(simulate(job, cluster=JITTER).center.value, simulate(job, cluster=JITTER, together=False).center.value)


def test_class_weights_and_ignored_targets_weigh_a_batch_as_in_the_loop():
    data = rows()
    x, y = data.tree
    y = y.clone()
    y[::7] = -100
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64))
    job = job_of(pg.SyncSGD(), loss=loss, data=type(data)((x, y)))
    assert same(simulate(job).center.value, simulate(job, together=False).center.value)


def test_hogwild_without_its_races_is_downpour(tmp_path):
    ends = []
    for scheme in (pg.Hogwild(), pg.Downpour(window=1)):
        result = pg.train(
            network(torch.float32),
            rows(dtype=torch.float32),
            optimizer="sgd:lr=0.1",
            scheme=scheme,
            engine=pg.Vector(3),
            run=pg.Run(out=tmp_path / name_of(scheme)),
        )
        ends.append(torch.cat([p.detach().view(-1) for p in result.model.parameters()]))
    assert torch.equal(*ends)
