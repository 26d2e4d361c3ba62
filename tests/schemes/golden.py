"""A center of three numbers, and commits to it: what an equation is worked through on by hand."""

from __future__ import annotations

import torch

from paragrad.bowl import Bowl
from paragrad.center import Center
from paragrad.data.leases import Leases
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial
from paragrad.job import Job
from paragrad.types import Commit


def center_of(scheme, *, workers=2):
    """A center at (1, 2, 3) that all have joined, and the replies they got; its optimiser is SGD with lr 0.1."""
    leases = Leases(batches=50, epochs=1, workers=workers, stolen=scheme.quorum(workers) == 1)
    start = torch.tensor([1.0, 2.0, 3.0])
    center = Center(scheme, start, workers=workers, leases=leases, optimizer=Bowl(lr=0.1).center_optimizer())
    replies = {reply.worker: reply for rank in range(workers) for reply in center.join(rank)}
    return center, replies


def commit(center, worker, value, *, sequence=1, steps=1, version=0, weight=1.0, lr=0.0, also=None):
    """Give the center a commit; returns the replies by worker."""
    held = center.leases.held(worker)[:steps]
    message = Commit(
        worker=worker,
        sequence=sequence,
        version=version,
        value=torch.tensor(value),
        also={name: torch.tensor(vector) for name, vector in (also or {}).items()},
        steps=steps,
        weight=weight,
        lr=lr,
        batches=held,
    )
    return {reply.worker: reply for reply in center.receive(message)}


def rows(count=48):
    """Rows for the bowl, which lies at their mean."""
    return Arrays(torch.randn(count, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))


def serial_of(scheme, workers, *, lr=0.05, count=48, batch=2, stolen=True):
    """Workers in turn on the bowl, for one epoch."""
    job = Job(scheme, lambda device: Bowl(lr=lr), rows(count), None, Plan(count, batch, 1, 0), count)
    return Serial(job, workers, stolen=stolen)
