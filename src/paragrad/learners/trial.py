"""A trial of two replicas: a step of both together must give the result of two separate steps.

Two ways to add the same numbers round differently. Rounding may switch a unit at a kink on or off (a ReLU whose input is
almost 0), which changes some elements of a gradient by any amount. So gradients are compared by norm. If they differ, the
trial is repeated in float64, where such units are rare, and from other points, where other units are at a kink. A model
that cannot be computed together differs at all points.
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
"""Largest relative difference of two gradients in norm: in the model's type, in float64, and at other points if the model
cannot be computed in float64 and some units may have switched."""
POINTS = 4
"""Points at which gradients that differ are compared again."""
JITTER = 0.01
"""Relative distance of these points from the initial weights."""


def same_together(learner: Batchable, source: Source, plan: Plan) -> bool:
    """Return whether two rows together get the gradients of each alone; raise torch's error if it cannot compute them."""
    exact = learner.weights.dtype == torch.float64 and not isinstance(learner, KerasLearner)
    if _same(learner, source, plan, FINE if exact else NEAR):
        return True
    try:
        finer = _in_float64(learner, source, plan)
    except Exception:
        finer = None  # the model works in one type only, and may raise anything in another
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
    """Return the model and two of its mini-batches in float64; None for Keras, which multiplies in float32 at most."""
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
    """Return whether gradients, buffers and losses equal those of the learner alone, up to the tolerance ``within``."""
    two = min(2, plan.positions)
    with _no_fallback():
        rows = TorchRows(learner, two, source, plan, gradients=True)
        outcomes = rows.run([Task(row, (row,)) for row in range(two)])
    assert rows.gradients is not None
    for row, (together, buffers, outcome) in enumerate(zip(rows.gradients, rows.buffers, outcomes, strict=True)):
        before, alone = learner.weights.clone(), torch.empty_like(learner.weights)
        with learner.unchanged():
            step = learner.gradient(_batch(source, plan, row), alone)
            learner.collect()
            after, moved = learner.buffers.clone(), not torch.equal(learner.weights, before)
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
    """Disable torch's loop over rows, which is slower than computing one worker after another."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)
