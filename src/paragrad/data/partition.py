"""Partitions: shards of the rows by label, or with class shares drawn from a Dirichlet distribution, one per worker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paragrad.data.plan import Plan, Rows
from paragrad.data.source import Arrays, Source, is_whole, leaves, target_of
from paragrad.errors import UsageError, counted
from paragrad.run import DIRICHLET, LABEL, partition_of

LEAST = 1e-12
"""Smallest share of a class. It is above 0, so that such a class can fill a shard when all others are used up."""


@dataclass(frozen=True, eq=False)
class PartitionedPlan(Plan):
    """Positions k, k + n, ... of worker k have the rows of its shard, permuted within it by (seed, epoch)."""

    workers: int = 1
    shards: Rows | None = None
    """All rows, shard after shard."""

    def _draw(self, epoch: int) -> Rows:
        assert self.shards is not None
        order = np.empty(self.rows, dtype=np.int64)
        start = 0
        for worker, places in enumerate(_places(self, self.workers)):
            own = self.shards[start : start + len(places)]
            order[places] = np.random.default_rng((self.seed, 6, epoch, worker)).permutation(own)
            start += len(places)
        return order


def _places(plan: Plan, workers: int) -> list[Rows]:
    """Return, per worker, the places in an epoch's order that belong to its mini-batches."""
    owners = np.arange(plan.rows) // plan.batch_size % workers
    return [np.flatnonzero(owners == worker) for worker in range(workers)]


def partitioned(plan: Plan, source: Source, partition: str, workers: int) -> Plan:
    """Return a plan with one shard of the rows per worker if ``partition`` asks for it, else the plan unchanged."""
    name, fields = partition_of(partition)
    if name not in (LABEL, DIRICHLET):
        return plan
    labels = _labels(source, partition)
    if type(plan) is not Plan:
        raise UsageError(f"partition={partition!r} needs rows in memory, but these are streamed.")
    if plan.batches < workers:
        raise UsageError(
            f"partition={partition!r} cuts {counted(plan.rows, 'row')} into {counted(workers, 'shard')}, but there "
            f"are only {counted(plan.batches, 'mini-batch')} of {plan.batch_size}: use fewer workers or a smaller batch_size."
        )
    if name == LABEL:
        rows = np.argsort(labels, kind="stable")
    else:
        sizes = [len(places) for places in _places(plan, workers)]
        rows = _dirichlet(labels, sizes, fields["alpha"], plan.seed)
    return PartitionedPlan(plan.rows, plan.batch_size, plan.epochs, plan.seed, workers, rows)


def _dirichlet(labels: Rows, sizes: list[int], alpha: float, seed: int) -> Rows:
    """Return all rows, shard after shard. Each worker draws its class shares from Dirichlet(alpha · class frequencies).

    Hsu, Qi and Brown 2019 (arXiv 1909.06335): shards of given sizes are filled row by row. A class that is used up is left
    out, and the other shares grow.
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
            f"partition={partition!r} needs the label of every row, but the rows are {type(source).__name__}, not arrays in "
            "memory: give arrays, or use partition='dealt', which ignores labels."
        )
    labels = leaves(target_of(source.tree))[-1]
    if labels.ndim != 1 or not is_whole(labels) or source.tree is labels:
        raise UsageError(
            f"partition={partition!r} needs one class label per row, but the targets are {labels.dtype} of shape "
            f"{tuple(labels.shape)}: give whole numbers, or use partition='dealt'."
        )
    return labels.to(torch.int64).numpy()
