"""Decide before a run whether a learner's replicas can be computed together, and how much memory that takes."""

from __future__ import annotations

import torch

from paragrad.data import seeds
from paragrad.data.plan import Plan
from paragrad.data.source import Source, Weighted, batch_at
from paragrad.learners import kerasrows
from paragrad.learners.keras import KerasLearner, unwrapped
from paragrad.learners.objective import OfOutput
from paragrad.learners.rowmodel import Batchable
from paragrad.learners.rows import Task, TorchRows
from paragrad.learners.trial import same_together
from paragrad.optim.optimizer import takes_model
from paragrad.optim.rows import rows_of


def why_not(learner: Batchable, source: Source, plan: Plan) -> str | None:
    """Return why this learner's replicas cannot be computed together; None if they can.

    The check makes a trial: two rows make a step together, and must arrive where each arrives alone.
    """
    if isinstance(learner, KerasLearner):
        reason = kerasrows.why_not(learner)
        if reason is not None:
            return reason
    else:
        if rows_of(learner.torch_optimizer) is None:
            return f"the optimiser {type(learner.torch_optimizer).__name__} has no batched version"
        if not isinstance(learner.objective, OfOutput):
            return "the loss is a function of the model and a whole mini-batch"
        if learner.carried and takes_model(learner.chosen.optimizer):
            return "the optimiser may change parameters that require no gradient"
    if learner.coarse:
        return "the model holds weights in a coarser type than the center"
    with seeds.kept():
        if isinstance(batch_at(source, plan, 0), Weighted):
            return "the rows have weights"
        try:
            if not same_together(learner, source, plan):
                return "a step of two workers together differs from two separate steps"
        except Exception as error:
            return _explained(error)
    if isinstance(learner, KerasLearner) and not kerasrows.same_steps(learner):
        return f"the installed version of Keras computes {type(learner.model.optimizer).__name__} differently"
    return None


def _explained(error: Exception) -> str:
    """Explain why torch cannot compute a model together; return torch's message if the reason is unknown."""
    message = unwrapped(str(error)).strip()
    if "randomness" in message:
        return "the model draws random numbers (dropout), which must not depend on which workers are computed together"
    if "item()" in message or "data-dependent control flow" in message:
        return "the model's operations depend on the values of a batch (data-dependent control flow)"
    if "fallback" in message.lower() or "batching rule" in message.lower():
        return "torch cannot compute one of the model's operations for many models at once"
    first = message.partition("\n")[0]
    return f"{type(error).__name__}: {first if len(first) < 160 else first[:160].rpartition(' ')[0] + ' ...'}"


def slots_of(learner: Batchable) -> int:
    """Return the number of vectors that the optimiser keeps per replica."""
    if isinstance(learner, KerasLearner):
        return sum(tensor.numel() for tensor in learner.state().values()) // learner.weights.numel()
    optimizer = rows_of(learner.torch_optimizer)
    return 2 if optimizer is None else len(optimizer.slots)


def activations(learner: Batchable, source: Source, plan: Plan) -> int:
    """Return the bytes that one replica's forward pass keeps for its backward pass, without the weights."""
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows = TorchRows(learner, 1, source, plan, gradients=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rows.run([Task(0, (0,))])
    sizes.pop(rows.weights.untyped_storage().data_ptr(), None)
    return sum(sizes.values())
