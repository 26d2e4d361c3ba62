"""Overlap on the engines: what it saves in time, what it costs in staleness, and that nothing is lost by it."""

from __future__ import annotations

import random
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.analysis.staleness import balance, samples
from paragrad.core.replica import Replica
from paragrad.core.state import private
from paragrad.core.worker import Window, run_window
from paragrad.engines.exchange.slot import Slot
from paragrad.engines.exchange.worker import Exchange
from paragrad.engines.serial import Serial
from paragrad.rundir.record import read
from tests.conftest import Watch, every_batch_once, train
from tests.engines.exchange.kills import train_counting
from tests.engines.exchange.victim import Counting
from tests.engines.sim.simulated import job_of, simulate

pytestmark = pytest.mark.usefixtures("one_thread")


# -- the virtual cluster --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("latency", "bandwidth"), [(0.25, None), (1.5, None), (0.0, 300.0)])
@pytest.mark.parametrize("scheme", [pg.Downpour(window=2), pg.SyncSGD()], ids=repr)
def test_a_window_takes_as_long_as_it_or_its_round_trip_and_not_both(scheme, latency, bandwidth):
    """One worker, a step a second: the k-th answer comes after k times the longer of both."""
    cluster = pg.Cluster(speeds=1.0, latency=latency, bandwidth=bandwidth)
    seconds = {}
    for overlap in (0, 1):
        job = job_of(replace(scheme, overlap=overlap), epochs=2)
        simulation = simulate(job, cluster=cluster, workers=1, together=False)
        seconds[overlap] = simulation.session.seconds
        commits = len(simulation.order)
    one_way = latency + (0 if bandwidth is None else simulation._size / bandwidth)
    window, trip = float(scheme.window), 2 * one_way
    assert commits * scheme.window == job.plan.positions
    # The first answer, to joining, comes one way; of the last exchange only the way there counts.
    assert seconds[0] == pytest.approx(commits * (window + trip))
    assert seconds[1] == pytest.approx(one_way + window + (commits - 1) * max(window, trip) + one_way)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_equal_workers_that_never_wait_are_2n_minus_1_updates_stale(workers, tmp_path):
    for overlap, due in ((0, workers - 1), (1, 2 * workers - 1)):
        job = job_of(pg.AGN(window=2, overlap=overlap), epochs=6)
        out = tmp_path / str(overlap)
        out.mkdir()
        simulate(job, workers=workers, directory=out, together=False)
        stale = [sample.staleness for sample in samples(read(out))]
        assert set(stale[2 * workers : -workers]) == {due}


def test_the_distance_of_a_window_that_began_in_flight_is_that_of_both_updates(tmp_path):
    job = replace(job_of(pg.Downpour(window=2, overlap=1), epochs=1), distances=True)
    centers = []
    simulation = simulate(job, workers=1, directory=tmp_path)
    again = job_of(pg.Downpour(window=2, overlap=1), epochs=1)
    serial = Serial(again, 1)
    serial.center.applied = lambda commit: centers.append(serial.center.value.clone())
    centers.append(serial.center.value.clone())
    serial.run()
    found = [sample.distance for sample in samples(read(tmp_path))]
    assert len(found) == len(simulation.order)
    for k, distance in enumerate(found[:-1], start=1):
        assert distance == pytest.approx(float((centers[k] - centers[max(0, k - 2)]).norm()), rel=1e-5)


@pytest.mark.parametrize(
    "cluster", [pg.Cluster(), pg.Cluster(latency=0.7), pg.Cluster(latency=5.0)], ids=["free", "near", "far"]
)
@pytest.mark.parametrize("together", [True, False])
def test_one_worker_is_the_same_training_with_and_without(cluster, together):
    """Schedule, local optimiser and all; only the time differs."""
    ends = []
    for overlap in (0, 1):
        job = job_of(
            pg.Downpour(window=3, overlap=overlap), optimizer=pg.Optimizer("adam:lr=0.01", schedule="cosine"), epochs=2
        )
        ends.append(simulate(job, cluster=cluster, workers=1, together=together).center.value)
    assert torch.allclose(*ends, atol=1e-12, rtol=0)


def normed(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


@pytest.mark.parametrize("latency", [0.0, 0.7])
@pytest.mark.parametrize("together", [True, False])
def test_what_batch_norm_sees_in_flight_is_carried(latency, together):
    states = []
    for overlap in (0, 1):
        job = job_of(pg.Downpour(window=3, overlap=overlap), module=normed(), epochs=2)
        for moment in (None, lambda: True):
            simulation = simulate(job, cluster=pg.Cluster(latency=latency), workers=1, together=together, moment=moment)
            states.append(simulation.center.state)
    for state in states[1:]:
        assert torch.allclose(state.value, states[0].value, atol=1e-12, rtol=0)
        assert torch.allclose(state.buffers, states[0].buffers, atol=1e-12, rtol=0)
        assert torch.equal(state.integers, states[0].integers)


# -- real processes -------------------------------------------------------------------------------------------------


def test_one_worker_process_is_plain_training_with_batch_norm_too(rows, tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)).double()
    data = rows[0].double(), rows[1]
    states = [
        train(
            net,
            data,
            tmp_path / str(overlap),
            scheme=pg.Downpour(window=3, overlap=overlap),
            engine=pg.Local(workers=1, threads=1),
            epochs=2,
        ).model.state_dict()
        for overlap in (0, 1)
    ]
    for name, value in states[0].items():
        assert torch.allclose(value.double(), states[1][name].double(), atol=1e-12, rtol=0), name


def test_a_model_of_a_coarser_type_goes_on_from_what_was_adopted(rows, tmp_path):
    """AGN's answer is not where the model stands: it must be brought there before the next window."""
    ends, starts = [], []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)
        data, engine = (rows[0].to(dtype), rows[1]), pg.Local(workers=1, threads=1)
        starts.append(vector(net))
        ends.append(vector(train(net, data, tmp_path / str(dtype), scheme=pg.AGN(window=4, overlap=1), engine=engine).model))
    assert float((ends[1] - ends[0]).norm()) < 0.1 * float((ends[0] - starts[0]).norm())


def vector(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).float()


def test_rounding_to_a_coarser_type_is_not_taken_for_movement_made_in_flight():
    scheme = pg.Downpour(overlap=1)
    job = job_of(scheme, optimizer="sgd:lr=0", dtype=torch.bfloat16)
    learner = job.make_learner("cpu")
    learner.weights.add_(0.001)
    me = Replica(learner.weights)
    me.at_send = me.local.clone()
    run_window(scheme, me, learner, job.train, job.plan, Window((0,)))
    assert torch.equal(me.local, me.at_send)


@pytest.mark.parametrize("scheme", [pg.AGN(window=2, overlap=1), pg.StalenessAware(overlap=1), pg.SyncSGD(overlap=1)], ids=repr)
def test_the_law_of_staleness_holds_in_the_record_of_real_processes(scheme, model, rows, tmp_path):
    train(model, rows, tmp_path / "run", scheme=scheme, engine=pg.Local(workers=2), epochs=4)
    found = balance(read(tmp_path / "run"))
    assert found.holds
    assert every_batch_once(tmp_path / "run", 4 * 50)
    in_progress = 2 * 2 * found.updates - found.commits
    assert found.others == in_progress
    # Rows run out at the end: a worker may then begin from an answer, and what is open is not ended by any commit.
    assert 0 <= found.unfinished + found.elsewhere <= 16 * 2
    ages = [sample.staleness for sample in samples(read(tmp_path / "run"))]
    assert sum(ages) / len(ages) == pytest.approx(3 if scheme.quorum(2) == 1 else 1, abs=16 * 2 / len(ages))


@pytest.mark.parametrize("scheme", [pg.AGN(window=2, overlap=1), pg.SyncSGD(overlap=1)], ids=repr)
def test_workers_killed_with_a_commit_in_flight_lose_nothing_of_others(scheme, tmp_path):
    dice = random.Random(1)

    def kill(watch: Watch, event: pg.Event) -> None:
        watch.signal(dice.randrange(2), signal.SIGKILL)
        if watch.commits < 40:
            watch.at = watch.commits + 12

    watch = Watch(at=7, act=kill)
    result = train_counting(Counting(2000), 120, tmp_path / "run", watch, scheme=scheme, engine=pg.Local(workers=2))
    assert result.summary["lost_workers"] >= 2
    assert balance(read(tmp_path / "run")).holds


def test_a_run_that_was_stopped_with_windows_in_flight_goes_on(model, rows, tmp_path):
    scheme = pg.AGN(window=3, overlap=1)

    def stop(event: pg.Event) -> bool:
        return event.kind == "commit" and event.data["clock"] == 11

    first = train(model, rows, tmp_path / "run", stop, scheme=scheme, epochs=3)
    second = train(model, rows, tmp_path / "run", scheme=scheme, epochs=3, run={"resume": True})
    assert second.summary["commits"] > first.summary["commits"] >= 11
    assert every_batch_once(tmp_path / "run", 3 * 50)
    assert pg.replay(tmp_path / "run", model, rows).equal


def test_the_gradient_of_the_window_in_flight_does_not_lie_where_the_center_reads():
    job = job_of(pg.SyncSGD(overlap=1))
    learner = job.make_learner("cpu")
    slot = Slot.make(private, 0, job, learner, window=2)
    exchange = Exchange(job, learner, slot, _Nobody(), workers=1, incarnation=0, answer=None, home=None)
    exchange.me.gradient.fill_(3.0)
    assert not bool((slot.value == 3.0).any())


class _Nobody:
    live_value = torch.empty(0)

    def pull(self, value: torch.Tensor) -> int:
        return 0
