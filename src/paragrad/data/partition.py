"""Which rows belong to which worker, where that is to matter: shards by label, or with shares drawn from a Dirichlet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paragrad.data.plan import Plan, Rows
from paragrad.data.source import Arrays, Source, leaves, target_of
from paragrad.errors import UsageError, counted
from paragrad.run import DIRICHLET, LABEL, partition_of

LEAST = 1e-12
"""A share that is not quite none: where all others are used up, the rest of a shard comes from such classes."""


@dataclass(frozen=True, eq=False)
class PartitionedPlan(Plan):
    """Dealt positions k, k + n, ... of worker k hold the rows of its own shard, permuted within it by (seed, epoch)."""

    workers: int = 1
    shards: Rows | None = None
    """All rows, shard after shard."""

    def _draw(self, epoch: int) -> Rows:
        assert self.shards is not None
        order = np.empty(self.rows, dtype=np.int64)
        start = 0
        for worker in range(self.workers):
            places = columns(self, self.workers, worker)
            own = self.shards[start : start + len(places)]
            order[places] = np.random.default_rng((self.seed, 6, epoch, worker)).permutation(own)
            start += len(places)
        return order


def columns(plan: Plan, workers: int, worker: int) -> Rows:
    """The places in an epoch's order that the mini-batches dealt to a worker are cut from."""
    places = np.arange(plan.rows, dtype=np.int64)
    own: Rows = places[places // plan.batch_size % workers == worker]
    return own


def partitioned(plan: Plan, source: Source, partition: str, workers: int) -> Plan:
    """The plan with each worker on rows of its own, where ``partition`` asks for that; else the plan as it is."""
    name, fields = partition_of(partition)
    if name not in (LABEL, DIRICHLET):
        return plan
    labels = _labels(source, partition)
    if type(plan) is not Plan:
        raise UsageError(f"partition={partition!r} needs rows that are in memory: these are streamed.")
    if plan.batches < workers:
        raise UsageError(
            f"partition={partition!r} cuts {counted(plan.rows, 'row')} into {counted(workers, 'shard')}, but there "
            f"are only {counted(plan.batches, 'mini-batch')} of {plan.batch_size}: use fewer workers or a smaller batch_size."
        )
    sizes = [len(columns(plan, workers, worker)) for worker in range(workers)]
    if name == LABEL:
        rows = np.argsort(labels, kind="stable")
    else:
        rows = dirichlet(labels, sizes, fields["alpha"], plan.seed)
    return PartitionedPlan(plan.rows, plan.batch_size, plan.epochs, plan.seed, workers, rows)


def dirichlet(labels: Rows, sizes: list[int], alpha: float, seed: int) -> Rows:
    """All rows, shard after shard: each worker draws its shares of the classes from Dirichlet(alpha · how common they are).

    Hsu, Qi and Brown 2019 (arXiv 1909.06335): shards of given sizes are filled row by row; a class that is used up is
    left out, and the other shares grow.
    """
    draw = np.random.default_rng((seed, 7))
    classes, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    shuffled = draw.permutation(len(labels))
    pools = [shuffled[inverse[shuffled] == number] for number in range(len(classes))]
    left, taken = counts.copy(), np.zeros_like(counts)
    parts: list[Rows] = []
    for size in sizes:
        shares = draw.dirichlet(np.maximum(alpha * counts / counts.sum(), LEAST))
        need = size
        while need:
            still = np.where(left > 0, np.maximum(shares, LEAST), 0.0)
            wanted = np.minimum(draw.multinomial(need, still / still.sum()), left)
            parts += [pools[k][taken[k] : taken[k] + wanted[k]] for k in np.flatnonzero(wanted)]
            taken += wanted
            left -= wanted
            need -= int(wanted.sum())
    return np.concatenate(parts).astype(np.int64)


def _labels(source: Source, partition: str) -> Rows:
    if not isinstance(source, Arrays):
        raise UsageError(
            f"partition={partition!r} looks at the label of every row, but the rows are {type(source).__name__}, not arrays in "
            "memory: give arrays, or deal the rows without regard to their labels (partition='dealt')."
        )
    labels = leaves(target_of(source.tree))[-1]
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex() or source.tree is labels:
        raise UsageError(
            f"partition={partition!r} needs one class label a row, but the targets are {labels.dtype} of shape "
            f"{tuple(labels.shape)}: give whole numbers, or use partition='dealt'."
        )
    found: Rows = labels.to(torch.int64).numpy()
    return found
