"""The vector engine on a GPU computes what the CPU does, one worker after another; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.models import builtin
from tests.engines.sim.simulated import job_of, rows, simulate
from tests.engines.test_vector import JITTER, OPTIMIZERS, ROUGH, SCHEMES, optimizer_for, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_every_scheme_is_that_of_the_cpu_in_float64(scheme):
    job = job_of(scheme, optimizer=optimizer_for(scheme), epochs=4)
    there, here = simulate(job, cluster=ROUGH, device="cuda"), simulate(job, cluster=ROUGH, together=False)
    assert there.order == here.order
    assert same(there.center.value.cpu(), here.center.value)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_local_optimisers_step_row_by_row_as_torch_does(optimizer):
    job = job_of(pg.AGN(window=4), optimizer=optimizer)
    there, here = simulate(job, cluster=JITTER, device="cuda"), simulate(job, cluster=JITTER, together=False)
    assert same(there.center.value.cpu(), here.center.value)


@pytest.mark.parametrize("scheme", [pg.AGN(window=4), pg.SyncSGD(), pg.AEASGD(window=2)], ids=repr)
def test_in_float32_it_stays_close_over_twenty_events(scheme):
    job = job_of(scheme, optimizer="sgd:lr=0.1", dtype=torch.float32, epochs=-(-20 * scheme.window // 29))
    there, here = simulate(job, cluster=JITTER, device="cuda"), simulate(job, cluster=JITTER, together=False)
    assert same(there.center.value.cpu(), here.center.value, within=1e-5)


def test_batch_norm_and_convolutions_are_those_of_the_cpu():
    module = builtin.build("resnet8", (8, 8), 3).double()
    data = rows()
    images = torch.randn(230, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    job = job_of(pg.AGN(window=3), module=module, data=type(data)((images, data.tree[1])), optimizer="sgd:lr=0.01", epochs=1)
    there, here = simulate(job, cluster=JITTER, device="cuda"), simulate(job, cluster=JITTER, together=False)
    assert same(there.center.value.cpu(), here.center.value, within=1e-9)
    assert same(there.center.state.buffers.cpu(), here.center.state.buffers, within=1e-9)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_a_thousand_workers_twice_give_the_same_bytes(tmp_path, precision):
    kept = []
    for name in ("one", "two"):
        torch.manual_seed(0)
        pg.train(
            nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 3)),
            rows(4000, torch.float32),
            scheme=pg.AGN(window=2),
            optimizer="adam:lr=0.001",
            engine=pg.Vector(1000, device="cuda", precision=precision, cluster=pg.Cluster(speeds=pg.LogNormal(1.0, 0.5))),
            batch_size=1,
            epochs=3,
            run=pg.Run(out=tmp_path / name, checkpoint_every=None),
        )
        kept.append([(tmp_path / name / file).read_bytes() for file in ("record.jsonl", "model.safetensors")])
    assert kept[0] == kept[1]


@pytest.mark.parametrize("scheme", [pg.AGN(window=4), pg.SyncSGD(), pg.ModelAveraging(window=3)], ids=repr)
@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", "adam:lr=0.01"])
def test_schedules_and_clipping_are_those_of_the_cpu(scheme, optimizer):
    chosen = pg.Optimizer(optimizer, schedule="cosine:warmup=0.1", clip_norm=0.2)
    job = job_of(scheme, optimizer=chosen, epochs=8)  # long enough for steps to become CUDA graphs
    there, here = simulate(job, cluster=JITTER, device="cuda"), simulate(job, cluster=JITTER, together=False)
    assert same(there.center.value.cpu(), here.center.value)
