"""A trial of two replicas: a step of both together must come to where each comes alone.

Two ways to add the same numbers round differently. That alone may switch a unit at a kink on or off (a ReLU whose input is
almost 0), and then changes some elements of a gradient by any amount. So gradients are compared by norm, and where they
differ the trial is repeated in float64, where such a unit is rarely met, and from other points, where it is another one.
A model that cannot be computed together differs at all of them.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paragrad.data import seeds
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays, Source, batch_at, joined, leaves, mapped
from paragrad.learners.keras import KerasLearner
from paragrad.learners.rowmodel import Batchable
from paragrad.learners.rows import Task, TorchRows
from paragrad.learners.torch import TorchLearner

NEAR, FINE, COARSE = 1e-4, 1e-9, 3e-3
"""How far two gradients may be from each other, of their norm: as they are, in float64, and from other points where a model
cannot be computed in float64 and some units may have been switched."""
POINTS = 4
"""Points at which gradients that differ are looked at again."""
JITTER = 0.01
"""How far these are from where the run starts, of the weights' own size."""


def same_together(learner: Batchable, source: Source, plan: Plan) -> bool:
    """Whether two rows come together to the gradients that each comes to alone; raises what torch cannot compute together."""
    exact = learner.weights.dtype == torch.float64 and not isinstance(learner, KerasLearner)
    if _same(learner, source, plan, FINE if exact else NEAR):
        return True
    try:
        finer = _in_float64(learner, source, plan)
    except Exception:
        finer = None  # the model is written for one type: whatever it raises in another, it is tried as it is
    within = COARSE if finer is None else FINE
    learner, source, plan = finer or (learner, source, plan)
    start, generator = learner.weights.clone(), torch.Generator().manual_seed(0)
    for point in range(POINTS):
        noise = torch.randn(start.shape, dtype=start.dtype, generator=generator)
        learner.weights.copy_(start + noise * (JITTER * (point > 0) * start.abs().mean()))
        learner.spread()
        try:
            if _same(learner, source, plan, within):
                return True
        finally:
            learner.weights.copy_(start)
            learner.spread()
    return False


def _in_float64(learner: Batchable, source: Source, plan: Plan) -> tuple[TorchLearner, Source, Plan] | None:
    """The same model and two of its mini-batches in float64; None for Keras, whose products on torch are float32 at most."""
    if isinstance(learner, KerasLearner):
        return None
    loss: Any = copy.deepcopy(learner.loss).double() if isinstance(learner.loss, nn.Module) else learner.loss
    finer = TorchLearner(copy.deepcopy(learner.module).double(), loss, learner.chosen)
    finer.carry(learner.carried)
    batches = [_batch(source, plan, position) for position in range(min(2, plan.positions))]
    rows = Arrays(mapped(joined(batches), lambda leaf: leaf.double() if leaf.is_floating_point() else leaf))
    size = len(leaves(batches[0])[0])
    finer.gradient(rows.batch(Plan(len(rows), size, 1).rows_of(0)), torch.empty_like(finer.weights))
    return finer, rows, Plan(len(rows), size, 1)


def _same(learner: Batchable, source: Source, plan: Plan, within: float) -> bool:
    """Whether gradients, buffers and losses are within so much of those that the learner comes to alone."""
    two = min(2, plan.positions)
    with _no_fallback():
        rows = TorchRows(learner, two, source, plan, gradients=True)
        outcomes = rows.run([Task(row, (row,)) for row in range(two)])
    assert rows.gradients is not None
    for row, (together, buffers, outcome) in enumerate(zip(rows.gradients, rows.buffers, outcomes, strict=True)):
        before = learner.weights.clone(), learner.buffers.clone(), learner.integers.clone()
        alone = torch.empty_like(learner.weights)
        step = learner.gradient(_batch(source, plan, row), alone)
        learner.collect()
        after, moved = learner.buffers.clone(), not torch.equal(learner.weights, before[0])
        for vector, old in zip((learner.weights, learner.buffers, learner.integers), before, strict=True):
            vector.copy_(old)
        learner.spread()
        same = (
            not moved
            and math.isclose(outcome.loss, step.loss * step.weight, rel_tol=within, abs_tol=within)
            and math.isclose(outcome.weight, step.weight, rel_tol=within)
            and float((together - alone).norm()) <= within * max(float(alone.norm()), 1e-12)
            and float((buffers - after).norm()) <= within * max(float(after.norm()), 1.0)
        )
        if not same:
            return False
    return True


def _batch(source: Source, plan: Plan, position: int) -> Any:
    seeds.seed_everything(plan.seed_of(position))
    return batch_at(source, plan, position)


@contextlib.contextmanager
def _no_fallback() -> Iterator[None]:
    """Without torch's own loop over rows, which would be slower than one worker after another."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)
