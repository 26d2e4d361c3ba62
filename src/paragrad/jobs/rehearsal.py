"""Tries loss and metrics on a few rows in the caller, so that a validation that would fail fails before the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from paragrad.data.load import Split, check_labels
from paragrad.data.plan import Rows
from paragrad.data.source import Selected, Source
from paragrad.errors import UsageError
from paragrad.learners.batch import call, fitting, split
from paragrad.learners.criterion import aligned, by_class
from paragrad.learners.keras import KerasLearner
from paragrad.learners.objective import OfOutput
from paragrad.learners.torch import TorchLearner

TRIED = 16
"""Number of rows evaluated before the run."""


def rehearse(learner: TorchLearner | KerasLearner, parts: Split, batch_size: int) -> int:
    """Evaluate the first rows to train on and, with the metrics, those to validate on; raise the errors of a validation.

    If a few rows are not enough for a metric (an AUC needs two classes), it is tried on all validation rows. Return the axis of
    the classes in the outputs: the last for Keras, axis 1 for losses of torch.
    """
    metrics, report, complaints = learner.metrics, learner.report, list[str]()
    learner.collect()
    before = [vector.clone() for vector in (learner.weights, learner.buffers, learner.integers)]
    try:
        learner.report = complaints.append
        with torch.random.fork_rng(devices=[]):
            learner.metrics = {}
            _evaluate(learner, Selected(parts.train, _first(parts.train)), batch_size)
            learner.metrics = metrics
            if parts.validation is not None:
                _evaluate(learner, Selected(parts.validation, _first(parts.validation)), batch_size)
                if complaints:
                    complaints.clear()
                    _evaluate(learner, parts.validation, batch_size)
    finally:
        learner.metrics, learner.report = metrics, report
        learner.collect()
        for vector, value in zip((learner.weights, learner.buffers, learner.integers), before, strict=True):
            vector.copy_(value)
        learner.spread()
    if complaints:
        raise UsageError(f"{complaints[0]}. A metric takes (output, target) of all rows and returns one number.")
    return (learner.objective.axis or 1) if isinstance(learner, TorchLearner) else -1


def _first(source: Source) -> Rows:
    return np.arange(min(TRIED, len(source)), dtype=np.int64)


def _evaluate(learner: TorchLearner | KerasLearner, source: Source, batch_size: int) -> None:
    try:
        learner.evaluate(source, batch_size)
    except UsageError:
        raise
    except Exception as error:  # a user-defined loss may raise anything
        why = f"The loss does not accept the output of the model: {type(error).__name__}: {error}"
        raise UsageError(why + _remedy(learner, source)) from error


def _remedy(learner: Any, source: Source) -> str:
    if not isinstance(learner, TorchLearner) or not isinstance(learner.objective, OfOutput):
        return ""
    output, target = _outputs(learner, source)
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
        return ""
    shapes = f" The output has the shape {tuple(output.shape)}, the target {tuple(target.shape)}."
    if by_class(learner.loss) and output.shape[:-1] == target.shape and target.ndim > 1:
        shapes += (
            " The loss of torch needs the classes on axis 1, not last: give loss=lambda output, target: "
            "torch.nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())."
        )
    return shapes


@torch.no_grad()
def _outputs(learner: TorchLearner, source: Source) -> tuple[Any, Any]:
    inputs, target = split(source.batch(_first(source)))
    learner.module.eval()
    try:
        output = call(learner.module, inputs)
    finally:
        learner.module.train()
    return output, aligned(output, target, learner.loss)


def check_fit(learner: TorchLearner, parts: Split) -> None:
    """Try the model on two rows; raise if it does not fit the data."""
    batch = parts.train.batch(np.arange(min(2, len(parts.train)), dtype=np.int64))
    learner.module.eval()
    try:
        with torch.no_grad(), fitting():
            output = learner.objective.try_on(learner.module, batch)
    finally:
        learner.module.train()
    if isinstance(learner.objective, OfOutput):
        inputs, target = split(batch)
        if target is inputs:
            _check_own_target(learner, output, target)
    if isinstance(output, torch.Tensor) and output.ndim == 2 and isinstance(learner.loss, nn.CrossEntropyLoss | nn.NLLLoss):
        for source in (parts.train, parts.validation):
            if source is not None:
                check_labels(source, output.shape[1])


def _check_own_target(learner: TorchLearner, output: Any, target: Any) -> None:
    """Raise if the loss cannot compare outputs and inputs, which are the targets of rows without targets."""
    shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__ for x in (output, target)]
    try:
        if isinstance(learner.loss, nn.MSELoss) and shapes[0] != shapes[1]:  # torch would broadcast one of them
            raise ValueError("the shapes differ")
        learner.loss(output, target)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UsageError(
            f"The data has no targets, so the loss compares the model's outputs {shapes[0]} with its inputs {shapes[1]}, as "
            f"for an autoencoder, and fails ({error}). Give inputs and targets: pg.train(model, (x, y))."
        ) from error
