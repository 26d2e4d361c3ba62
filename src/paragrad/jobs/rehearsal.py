"""Loss, metrics and evaluation tried on a few rows in the caller: what would fail in a validation fails before the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from paragrad.data.load import Split, check_labels
from paragrad.data.plan import Rows
from paragrad.data.source import Source
from paragrad.errors import UsageError
from paragrad.learners.batch import call, fitting, split
from paragrad.learners.criterion import aligned, by_class
from paragrad.learners.keras import KerasLearner
from paragrad.learners.objective import OfOutput
from paragrad.learners.torch import TorchLearner

TRIED = 16
"""Rows that are evaluated before the run."""


class _First:
    """The first rows of a source."""

    def __init__(self, source: Source, rows: int) -> None:
        self._source = source
        self._rows = min(rows, len(source))

    def __len__(self) -> int:
        return self._rows

    def batch(self, rows: Rows) -> Any:
        return self._source.batch(rows)


def rehearse(learner: TorchLearner | KerasLearner, parts: Split, batch_size: int) -> int:
    """Evaluate the first rows to train on, and with the metrics those to validate on; raise what would go wrong.

    A metric that a few rows are not enough for (an AUC needs two classes) is tried on all rows that it will be given. Returns
    the axis of the outputs along which classes are compared: Keras has them last, torch's losses on axis 1.
    """
    metrics, report, said = learner.metrics, learner.report, list[str]()
    learner.collect()
    before = [vector.clone() for vector in (learner.weights, learner.buffers, learner.integers)]
    try:
        learner.report = said.append
        with torch.random.fork_rng(devices=[]):
            learner.metrics = {}
            _evaluate(learner, _First(parts.train, TRIED), batch_size)
            learner.metrics = metrics
            if parts.validation is not None:
                _evaluate(learner, _First(parts.validation, TRIED), batch_size)
                if said:
                    said.clear()
                    _evaluate(learner, parts.validation, batch_size)
    finally:
        learner.metrics, learner.report = metrics, report
        learner.collect()
        for vector, value in zip((learner.weights, learner.buffers, learner.integers), before, strict=True):
            vector.copy_(value)
        learner.spread()
    if said:
        raise UsageError(f"{said[0]}. A metric takes (output, target) of all rows and returns one number.")
    return (learner.objective.axis or 1) if isinstance(learner, TorchLearner) else -1


def _evaluate(learner: TorchLearner | KerasLearner, source: Source, batch_size: int) -> None:
    try:
        learner.evaluate(source, batch_size)
    except UsageError:
        raise
    except Exception as error:  # a loss of the user's own may raise anything
        why = f"The loss does not take what the model puts out: {type(error).__name__}: {error}"
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
            " torch's loss has the classes on axis 1, and not last: give loss=lambda output, target: "
            "torch.nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())."
        )
    return shapes


@torch.no_grad()
def _outputs(learner: TorchLearner, source: Source) -> tuple[Any, Any]:
    """What the model says of the first rows, and their targets."""
    inputs, target = split(source.batch(np.arange(min(TRIED, len(source)), dtype=np.int64)))
    learner.module.eval()
    try:
        output = call(learner.module, inputs)
    finally:
        learner.module.train()
    return output, aligned(output, target, learner.loss)


def check_fit(learner: TorchLearner, parts: Split) -> None:
    """Try two rows before any process is started: a model that does not fit its data fails here, in the caller."""
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
    """Rows without targets are their own, as an autoencoder wants them; raise where the loss cannot compare the two."""
    shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__ for x in (output, target)]
    try:
        if isinstance(learner.loss, nn.MSELoss) and shapes[0] != shapes[1]:  # torch would stretch one of them
            raise ValueError("the shapes differ")
        learner.loss(output, target)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UsageError(
            f"The data has no targets, so the loss compares the model's outputs {shapes[0]} with its inputs {shapes[1]}, as "
            f"for an autoencoder, and fails ({error}). Give inputs and targets: pg.train(model, (x, y))."
        ) from error
