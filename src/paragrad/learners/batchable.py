"""Whether the replicas of a learner can be computed together, and what that takes: tried before a run, on two of them."""

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
from paragrad.learners.torch import TorchLearner
from paragrad.learners.trial import same_together
from paragrad.optim.optimizer import asks_for_model
from paragrad.optim.rows import rows_of


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
    if isinstance(learner, TorchLearner) and not isinstance(learner.objective, OfOutput):
        return "the loss is a function of the model and a whole mini-batch"
    if isinstance(learner, TorchLearner) and learner.carried and asks_for_model(learner.chosen):
        return "the optimiser may change parameters that require no gradient"
    if learner.coarse:
        return "the model holds weights in a coarser type than the center"
    with seeds.kept():
        if isinstance(batch_at(source, plan, 0), Weighted):
            return "its rows have weights"
        try:
            if not same_together(learner, source, plan):
                return "a step of two rows together is not the same as one after another"
        except Exception as error:
            return _in_words(error)
    if isinstance(learner, KerasLearner) and not kerasrows.same_steps(learner):
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
