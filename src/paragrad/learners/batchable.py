"""Whether the replicas of a learner can be computed together, and what that takes: tried before a run, on two of them."""

from __future__ import annotations

import math
from typing import Any

import torch

from paragrad.data.plan import Plan
from paragrad.data.source import Source, Weighted
from paragrad.learners import kerasrows
from paragrad.learners.keras import KerasLearner, unwrapped
from paragrad.learners.rowmodel import Batchable
from paragrad.learners.rows import Task, TorchRows
from paragrad.optim.rows import rows_of
from paragrad.types import Done


def why_not(learner: Batchable, source: Source, plan: Plan) -> str | None:
    """Why this learner's replicas cannot be computed together; None where they can.

    It is tried: two rows make a step together, and must come to where each comes alone.
    """
    if isinstance(learner, KerasLearner):
        reason = kerasrows.why_not(learner)
        if reason is not None:
            return reason
    elif rows_of(learner.torch_optimizer) is None:
        return f"the optimiser {type(learner.torch_optimizer).__name__} is not known for rows"
    if isinstance(source.batch(plan.rows_of(0)), Weighted):
        return "its rows have weights"
    if learner.coarse:
        return "the model holds weights in a coarser type than the center"
    two = min(2, plan.positions)
    functorch: Any = torch._C._functorch
    fallback = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)  # a loop inside torch would be slower than ours
    try:
        rows = TorchRows(learner, two, source, plan, gradients=True)
        tasks = [Task(row, (row,)) for row in range(two)]
        outcomes = rows.run(tasks)
        buffers = rows.buffers.clone()
        rows.run(tasks)  # the first step shows which layers there are, and only later ones are made as in a run
    except Exception as error:
        return _in_words(error)
    finally:
        functorch._set_vmap_fallback_enabled(fallback)
    assert rows.gradients is not None
    for row in range(two):
        if not _same_alone(learner, source.batch(plan.rows_of(row)), rows.gradients[row], buffers[row], outcomes[row]):
            return "a step of two rows together is not the same as one after another"
    if isinstance(learner, KerasLearner) and not kerasrows.same_steps(learner, rows.gradients[0]):
        return (
            f"this version's {type(learner.model.optimizer).__name__} steps in another way than the one that is known for rows"
        )
    return None


def _in_words(error: Exception) -> str:
    """What keeps a model from being computed together; torch's own words where they are not known."""
    said = unwrapped(str(error)).strip()
    if "randomness" in said:
        return "the model draws random numbers (dropout), which must not depend on who is computed with whom"
    if "item()" in said or "data-dependent control flow" in said:
        return "what the model does depends on the values of a batch (data-dependent control flow)"
    if "fallback" in said.lower() or "batching rule" in said.lower():
        return "torch has no way to compute one of its operations for many models at once"
    first = said.partition("\n")[0]
    return f"{type(error).__name__}: {first if len(first) < 160 else first[:160].rpartition(' ')[0] + ' ...'}"


def _same_alone(learner: Batchable, batch: Any, together: torch.Tensor, buffers: torch.Tensor, outcome: Done) -> bool:
    """Whether a row's gradient, buffers and loss are what the learner comes to alone."""
    before = learner.weights.clone(), learner.buffers.clone(), learner.integers.clone()
    gradient = torch.empty_like(learner.weights)
    with torch.random.fork_rng(devices=[]):
        step = learner.gradient(batch, gradient)
    learner.collect()
    after = learner.buffers.clone()
    for vector, old in zip((learner.weights, learner.buffers, learner.integers), before, strict=True):
        vector.copy_(old)
    learner.spread()
    # Keras on torch multiplies matrices in float32, whatever the type of its layers.
    fine = learner.weights.dtype == torch.float64 and not isinstance(learner, KerasLearner)
    tolerance = 1e-9 if fine else 1e-3
    scale = max(float(gradient.abs().max()), 1e-12)
    return (
        math.isclose(outcome.loss, step.loss * step.weight, rel_tol=tolerance, abs_tol=tolerance)
        and math.isclose(outcome.weight, step.weight, rel_tol=tolerance)
        and bool((together - gradient).abs().max() <= tolerance * scale)
        and torch.allclose(buffers, after, rtol=tolerance, atol=tolerance)
    )


def slots_of(learner: Batchable) -> int:
    """How many vectors the optimiser keeps for each replica."""
    if isinstance(learner, KerasLearner):
        return sum(tensor.numel() for tensor in learner.state().values()) // learner.weights.numel()
    optimizer = rows_of(learner.torch_optimizer)
    return 2 if optimizer is None else len(optimizer.slots)


def activations(learner: Batchable, source: Source, plan: Plan) -> int:
    """Bytes that the forward pass of one replica keeps for its backward pass, beside the weights."""
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows = TorchRows(learner, 1, source, plan, gradients=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rows.run([Task(0, (0,))])
    seen.pop(rows.weights.untyped_storage().data_ptr(), None)
    return sum(seen.values())
