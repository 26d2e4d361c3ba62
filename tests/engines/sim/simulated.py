"""What the tests of the vector engine share: a small network in float64, simulated in any way, and the order it ran in."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import paragrad as pg
from paragrad.core.job import Job
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial
from paragrad.engines.sim.replicas import BatchedReplicas, SeparateReplicas
from paragrad.engines.sim.simulation import Simulation
from paragrad.learners.torch import TorchLearner
from paragrad.rundir.session import Session

WORKERS = 4


def network(dtype=torch.float64):
    """A smooth one: a kink would make an ulp of difference grow."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def rows(count=230, dtype=torch.float64):
    """Three classes; the last mini-batch of an epoch is a short one."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 5, dtype=torch.float64, generator=generator)
    return Arrays((x.to(dtype), (x[:, :3] + 0.3 * x[:, 2:]).argmax(1)))


def job_of(
    scheme, *, optimizer="sgd:lr=0.1", module=None, loss=None, dtype=torch.float64, epochs=4, distances=False, data=None
):
    """A training of that network."""
    module, loss, data = module or network(dtype), loss or nn.CrossEntropyLoss(), data or rows(dtype=dtype)

    def make(device):
        return TorchLearner(module, loss, optimizer, device=device)

    return Job(scheme, make, data, None, Plan(len(data), 8, epochs, seed=5), 64, distances=distances)


def simulate(
    job, *, cluster=None, workers=WORKERS, together=True, moment=None, chunk=None, run=None, directory=None, device="cpu"
):
    """A whole run; the simulation, with its center and what it cost."""
    directory = Path(directory or tempfile.mkdtemp())
    run = run or pg.Run(validate_every=None, checkpoint_every=None)
    session = Session(directory, run, job.plan, identity={})
    learner = job.make_learner("cpu")
    if together:
        replicas = BatchedReplicas(job, learner, workers, device, precision="float32", chunk=chunk)
    else:
        replicas = SeparateReplicas(job, workers, "cpu")
    simulation = Simulation(job, session, learner, replicas, workers, cluster or pg.Cluster(), early_moment=moment)
    applied = []
    attach = session.attach

    def watch(center):
        attach(center)
        note = center.applied
        center.applied = lambda commit: (applied.append((commit.worker, commit.sequence, commit.batches)), note(commit))

    session.attach = watch
    try:
        simulation.run()
    finally:
        session.close()
    simulation.order = applied
    return simulation


def in_this_order(job, order, *, workers=WORKERS, stolen=None):
    """The same run by the plain loop: one worker at a time, in the order of these commits."""
    ranks = iter([worker for worker, _, _ in order])
    stolen = job.scheme.quorum(workers) == 1 if stolen is None else stolen

    def choose(ready):
        rank = next(ranks)
        assert rank in ready, f"worker {rank} is not ready, of {ready}"
        return rank

    return Serial(job, workers, choose=choose, stolen=stolen)
