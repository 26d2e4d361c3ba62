"""The settings of a run for run.toml: enough to repeat it, if everything has a name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paragrad.cluster import to_config
from paragrad.codecs.codec import Codec
from paragrad.config import options
from paragrad.data.load import Split
from paragrad.data.paths import are_paths
from paragrad.data.plan import Plan
from paragrad.models import toys
from paragrad.models.builtin import is_keras
from paragrad.optim.choice import Optimizer, spelling
from paragrad.optim.optimizer import OptimizerLike
from paragrad.run import Run
from paragrad.schemes.scheme import Scheme
from paragrad.types import SchemePlan


def settings_of(
    run: Run,
    given: Mapping[str, Any],
    parts: Split,
    model: Any,
    loss: Any,
    metrics: Any,
    optimizer: Any,
    scheme: Scheme,
    engine: Any,
    codec: Codec | None,
    plan: Plan,
    holdout: float | None,
) -> dict[str, Any]:
    """Return the content of run.toml."""
    spelled, cluster = {**given, **run.spelled}, getattr(engine, "cluster", None)
    table = None if parts.opened is None else parts.opened.table.config()
    config: dict[str, Any] = {
        "data": spelled["data"],
        "validation": spelled["validation"],
        **(table or {}),
        "model": spelled.get("model", model.spelled() if isinstance(model, toys.Toy) else f"python:{type(model).__name__}"),
        "loss": spelled.get("loss", spelling(loss)),
        "metric": None if isinstance(metrics, Mapping) else [one for one in metrics or () if isinstance(one, str)] or None,
        **({} if optimizer is None and is_keras(model) else Optimizer.of(optimizer).spelled()),
        "scheme": options.describe(scheme),
        "engine": options.describe(engine),
        "codec": None if codec is None else options.describe(codec),
        "cluster": None if cluster is None else to_config(cluster),
        "epochs": plan.epochs,
        "batch_size": plan.batch_size,
        "seed": plan.seed,
        "partition": run.partition,
        "distances": run.distances or None,
        "holdout": holdout,
        "checkpoint_every": run.checkpoint_every,
        "validate_every": run.validate_every,
        "keep": run.keep,
        "max_seconds": run.stop.seconds,
        "target_accuracy": run.stop.accuracy,
        "target_loss": run.stop.loss,
        "patience": run.stop.patience,
    }
    meant = ("checkpoint_every", "validate_every")  # None is a choice here, not the default
    return {key: value for key, value in config.items() if value is not None or key in meant}


def paths_of(data: Any) -> str | list[str] | None:
    """Return the paths of rows that are given as files; None if they were made in Python."""
    if isinstance(data, str | Path):
        return str(data)
    return [str(path) for path in data] if isinstance(data, list | tuple) and are_paths(data) else None


def describe_optimizer(optimizer: OptimizerLike | None, model: Any) -> str:
    """Return the optimiser and its settings in a line."""
    if optimizer is None and is_keras(model):
        return type(model.optimizer).__name__
    given = {key: value for key, value in Optimizer.of(optimizer).spelled().items() if value is not None}
    return ", ".join(str(value) if key == "optimizer" else f"{key}={value}" for key, value in given.items())


def outlook(plan: Plan, workers: int, optimizer: OptimizerLike | None, model: Any) -> SchemePlan:
    """Return the facts about a run by which its scheme may warn."""
    if optimizer is None and is_keras(model):
        name: str | None = type(model.optimizer).__name__.lower()
    else:
        chosen = Optimizer.of(optimizer).optimizer
        name = options.split_fields(chosen)[0].lower() if isinstance(chosen, str) else None
    return SchemePlan(workers=workers, steps=plan.batches * plan.epochs / workers, optimizer=name)
