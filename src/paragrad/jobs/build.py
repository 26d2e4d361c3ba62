"""Builds a job from a model and rows, for ``pg.train``, ``pg.join`` and ``pg.replay``."""

from __future__ import annotations

from typing import Any

from torch import nn

from paragrad.codecs.codec import Codec
from paragrad.core.job import Job
from paragrad.data import load
from paragrad.data.load import Split
from paragrad.data.partition import partitioned
from paragrad.data.source import plan_of
from paragrad.errors import UsageError, counted
from paragrad.evaluation.figures import MetricsLike
from paragrad.jobs.factories import learner_factory
from paragrad.learners.criterion import Loss
from paragrad.models import losses, toys
from paragrad.models.builtin import is_keras
from paragrad.optim.optimizer import OptimizerLike
from paragrad.schemes.scheme import Scheme

BATCH_SIZE = 32
"""Default number of rows per mini-batch."""
EVALUATION_BATCH = 512


def read_rows(
    model: Any, data: Any, *, validation: Any = None, holdout: float | None = None, seed: int, loss: Loss | str | None
) -> Split:
    """Read the rows to train and to validate on, in the form that this model and loss need."""
    if isinstance(data, Split):
        return data
    width = model.size if isinstance(model, toys.Toy) else None
    # A user-defined learner interprets its targets itself.
    as_classes = losses.as_classes(loss) if isinstance(model, nn.Module) else False
    return load.split(data, validation, holdout, seed, width=width, keras=is_keras(model), as_classes=as_classes)


def build_job(
    model: Any,
    parts: Split,
    *,
    scheme: Scheme,
    codec: Codec | None,
    loss: Loss | str | None,
    optimizer: OptimizerLike | None,
    metrics: MetricsLike | None = None,
    workers: int,
    epochs: int,
    batch_size: int | None,
    seed: int,
    partition: str,
    distances: bool = False,
    notes: list[str] | None = None,
) -> Job:
    """Return the job: a plan of the rows and a function that makes a learner; add to ``notes``."""
    notes = [] if notes is None else notes
    loader = parts.batch_size
    if loader is not None and batch_size is not None and batch_size != loader:
        notes.append(f"Mini-batches have {batch_size} rows (batch_size), not the {loader} of the DataLoader.")
    size = batch_size if batch_size is not None else loader or BATCH_SIZE
    plan = plan_of(parts.train, batch_size=size, epochs=epochs, seed=seed)
    if workers > plan.batches:
        raise UsageError(
            f"{counted(workers, 'worker')}, but an epoch of {counted(plan.rows, 'row')} has only "
            f"{counted(plan.batches, 'mini-batch')} of {plan.batch_size}. Use at most {counted(plan.batches, 'worker')}, or a "
            "smaller batch_size."
        )
    make = learner_factory(model, loss, optimizer, metrics, parts, scheme, notes)
    plan = partitioned(plan, parts.train, partition, workers)
    return Job(scheme, make, parts.train, parts.validation, plan, EVALUATION_BATCH, distances=distances, codec=codec)
