"""What the tests of single schemes share: a center of three numbers, whole runs on a bowl, and plain training beside them."""

from __future__ import annotations

import torch
from torch import nn

from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.data.leases import Leases
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.serial import Serial
from paragrad.laws.bowl import Bowl
from paragrad.types import Commit

START = (1.0, 2.0, 3.0)


def vector(*numbers):
    """In the precision of the bowl."""
    return torch.tensor(numbers, dtype=torch.float64)


def close(left, right, within=1e-12):
    """Equal but for rounding."""
    return torch.allclose(left, right, atol=within, rtol=0)


def near(value, *numbers):
    """Equal to these numbers but for rounding."""
    return close(value, vector(*numbers), 1e-10)


# -- three numbers --------------------------------------------------------------------------------------------------


def center_of(scheme, *, workers=2, lr=0.1, optimizer=None, batches=200):
    """A center at (1, 2, 3) that every worker has joined; where it holds an optimiser, that is plain SGD unless given."""
    leases = Leases(batches=batches, epochs=1, workers=workers, stolen=scheme.quorum(workers) == 1)
    if scheme.ships == "gradient" and optimizer is None:
        optimizer = Bowl(lr=lr).center_optimizer()
    center = Center(scheme, vector(*START), workers=workers, leases=leases, optimizer=optimizer)
    for rank in range(workers):
        center.join(rank)
    return center


def send(center, worker, value, *, sequence=None, version=None, steps=1, weight=1.0, lr=0.1, seconds=1.0, **also):
    """Commit a value taken at a clock (now, if not said); the replies that it brings, by worker."""
    waiting = {position for other in center.round.commits for position in other.batches}
    message = Commit(
        worker=worker,
        sequence=center.last(worker) + 1 if sequence is None else sequence,
        version=center.clock if version is None else version,
        value=vector(*value),
        also={name: vector(*numbers) for name, numbers in also.items()},
        steps=steps,
        weight=weight,
        lr=lr,
        seconds=seconds,
        batches=tuple(position for position in center.leases.held(worker) if position not in waiting)[:steps],
    )
    return {reply.worker: reply for reply in center.receive(message)}


def commit(center, worker, value, *, version=0, sequence=1, **rest):
    """Commit the first window of a worker, begun at clock 0 unless said otherwise."""
    return send(center, worker, value, version=version, sequence=sequence, **rest)


# -- whole runs on a bowl -------------------------------------------------------------------------------------------


def bowl_rows(rows):
    """The bowl lies at their mean."""
    return Arrays(torch.randn(rows, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def serial(scheme, workers, *, rows=48, epochs=3, batch=4, lr=0.05, stolen=False, source=None, kind=Serial, choose=None):
    """Workers on a bowl in one process, ready to run."""
    source = bowl_rows(rows) if source is None else source
    job = Job(scheme, lambda device: Bowl(lr=lr), source, None, Plan(rows, batch, epochs, 0), rows)
    return kind(job, workers, stolen=stolen, **({} if choose is None else {"choose": choose}))


def run(scheme, workers, *, lr=0.05, epochs=3, rows=46, flat=False, choose=None, commits=None):
    """A whole run, the workers in turn unless told otherwise; flat: all rows are 0, so that nothing but the scheme moves."""
    source = Arrays(torch.zeros(rows, 7, dtype=torch.float64)) if flat else None
    made = serial(scheme, workers, rows=rows, epochs=epochs, lr=lr, stolen=True, source=source, choose=choose)
    made.run(commits)
    return made


def slope(made, position, at):
    """The bowl's gradient for one mini-batch, written out again."""
    gap = at - made.job.train.batch(made.job.plan.rows_of(position))
    return (Bowl().curvature * gap).mean(0)


def weights_of(made):
    """Where each worker stands."""
    return [actor.learner.weights for actor in made.actors]


# -- plain training beside them -------------------------------------------------------------------------------------


def plain(*, lr=0.05, epochs=3, rows=46, momentum=0.0, nesterov=False):
    """One process with torch's SGD on the same mini-batches."""
    source, plan, bowl = bowl_rows(rows), Plan(rows, 4, epochs, 0), Bowl()
    parameter = nn.Parameter(bowl.weights)
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=nesterov)
    for position in range(plan.positions):
        gradient = torch.empty_like(bowl.weights)
        bowl.gradient(source.batch(plan.rows_of(position)), gradient)
        parameter.grad = gradient
        optimizer.step()
    return bowl.weights


def trained_alone(model, x, y, *, epochs, lr=0.1):
    """Plain PyTorch on the mini-batches of 8 rows that a run with seed 0 would use, in their order."""
    plan, optimizer = Plan(len(x), 8, epochs, 0), torch.optim.SGD(model.parameters(), lr=lr)
    for position in range(plan.positions):
        chosen = torch.from_numpy(plan.rows_of(position))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def parameters_of(result):
    """The trained parameters."""
    return [parameter.detach() for parameter in result.model.parameters()]
