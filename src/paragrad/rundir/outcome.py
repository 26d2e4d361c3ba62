"""The result of a run: the trained model, its validation, and the summary."""

from __future__ import annotations

import copy
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from paragrad import __version__
from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.data.source import Source
from paragrad.learners import kerasmodel
from paragrad.learners.keras import KerasLearner
from paragrad.learners.kerasoptimizer import KerasCenter
from paragrad.learners.learner import Learner
from paragrad.learners.torch import TorchLearner
from paragrad.models.builtin import is_keras
from paragrad.rundir.grid import fill
from paragrad.rundir.session import Session
from paragrad.schemes.traits import is_shared


def trained(model: Any, learner: Learner, center: Center) -> Any:
    """Return a copy of the user's model with the trained weights, or the learner if the user gave one."""
    if isinstance(learner, KerasLearner) and is_keras(model):
        if isinstance(center.optimizer, KerasCenter):
            learner.load(center.optimizer.state())
        return learner.copy(kerasmodel.device_of(model)).eval()
    if not isinstance(learner, TorchLearner) or not isinstance(model, nn.Module):
        return learner
    result = copy.deepcopy(model)
    result.load_state_dict(learner.module.state_dict())
    return result.eval()


def bring(learner: Learner, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the tensors of a center or of a snapshot into the learner."""
    fill(tensors, learner.weights, learner.buffers, learner.integers)
    learner.spread()


def bring_to_result(
    session: Session, learner: Learner, rows: Source | None, batch: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Load the weights that are kept into the learner; return their metrics and their origin."""
    snapshots, metrics = session.snapshots, dict[str, float]()
    last = snapshots.of_center()
    bring(learner, last.tensors)
    evaluated = rows is not None and not snapshots.is_decided
    if evaluated and (metrics := _evaluate(session, learner, rows, batch)):
        snapshots.conclude(metrics)
    best = snapshots.best.snapshot if session.run.keeps_best else None
    kept = best or last
    if kept.clock != last.clock or not evaluated:
        bring(learner, kept.tensors)
        metrics = _evaluate(session, learner, rows, batch)
    return metrics, {"weights": "last" if best is None else "best", "epoch": kept.epoch, "clock": kept.clock}


def _evaluate(session: Session, learner: Learner, rows: Source | None, batch: int) -> dict[str, float]:
    if rows is None:
        return {}
    try:
        return learner.evaluate(rows, batch)
    except Exception as error:  # user code may raise anything, and the trained model must not be lost
        session.emit(
            "warning", message=f"The validation at the end failed ({type(error).__name__}: {error}); the model is kept."
        )
        return {}


def traffic(job: Job, session: Session, learner: Learner) -> dict[str, Any]:
    """Return the bytes of vectors (without buffers) that workers sent; with a codec, also the compression ratio."""
    tally, scheme = session.tally, job.scheme
    sent = tally.commits + tally.refused + tally.dropped
    vectors = 0 if is_shared(scheme) else 1 + len(scheme.sends)
    plain = sent * vectors * learner.weights.numel() * learner.weights.element_size() // scheme.parts
    if job.codec is None:
        return {"bytes_sent": plain}
    return {"bytes_sent": tally.bytes, "plain_over_sent": round(plain / tally.bytes, 2) if tally.bytes else None}


def summarise(facts: dict[str, Any], session: Session, metrics: dict[str, float], kept: dict[str, Any]) -> dict[str, Any]:
    """Return the content of summary.json."""
    tally = session.tally
    return {
        **facts,
        "steps": tally.steps,
        "commits": tally.commits,
        "samples": tally.samples,
        "seconds": round(session.seconds, 4),
        "samples_per_second": round(session.rate, 2),
        "train_loss": tally.train_loss,
        "test_loss": metrics.get("loss"),
        "test_accuracy": metrics.get("accuracy"),
        "metrics": {name: value for name, value in metrics.items() if name not in ("loss", "accuracy")},
        "staleness": tally.staleness.summary(),
        "refused_commits": tally.refused,
        "dropped_commits": tally.dropped,
        "lost_workers": tally.lost,
        "kept": kept,
        "stopped": session.stopped or "finished",
        **session.measured,
        "versions": {
            "paragrad": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }
