"""What comes of a run: the trained model, what validation finds of it, and the summary."""

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
    """Return the model as the user gave it, with what the learner holds; or the learner, where it is the user's own."""
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
    """Bring the learner to a center, or to a snapshot of one."""
    fill(tensors, learner.weights, learner.buffers, learner.integers)
    learner.spread()


def bring_to_result(
    session: Session, learner: Learner, rows: Source | None, batch: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Bring the learner to the weights that are kept; return what validation finds of them, and which they are."""
    snapshots, found = session.snapshots, dict[str, float]()
    last = snapshots.of_center()
    bring(learner, last.tensors)
    looked = rows is not None and not snapshots.is_decided
    if looked and (found := _evaluated(session, learner, rows, batch)):
        snapshots.conclude(found)
    best = snapshots.best.snapshot if session.run.keeps_best else None
    kept = best or last
    if kept.clock != last.clock or not looked:
        bring(learner, kept.tensors)
        found = _evaluated(session, learner, rows, batch)
    return found, {"weights": "last" if best is None else "best", "epoch": kept.epoch, "clock": kept.clock}


def _evaluated(session: Session, learner: Learner, rows: Source | None, batch: int) -> dict[str, float]:
    if rows is None:
        return {}
    try:
        return learner.evaluate(rows, batch)
    except Exception as error:  # code of the user's, which may raise anything: the model is trained, and is to be kept
        session.emit(
            "warning", message=f"The validation at the end failed ({type(error).__name__}: {error}); the model is kept."
        )
        return {}


def traffic(job: Job, session: Session, learner: Learner) -> dict[str, Any]:
    """Bytes of the vectors that workers sent, those of buffers left aside; and how many times as many they would be plain."""
    tally, scheme = session.tally, job.scheme
    sent = tally.commits + tally.refused + tally.dropped
    vectors = 0 if is_shared(scheme) else 1 + len(scheme.sends)
    plain = sent * vectors * learner.weights.numel() * learner.weights.element_size() // scheme.parts
    if job.codec is None:
        return {"bytes_sent": plain}
    return {"bytes_sent": tally.bytes, "plain_over_sent": round(plain / tally.bytes, 2) if tally.bytes else None}


def summarise(facts: dict[str, Any], session: Session, found: dict[str, float], kept: dict[str, Any]) -> dict[str, Any]:
    tally = session.tally
    return {
        **facts,
        "steps": tally.steps,
        "commits": tally.commits,
        "samples": tally.samples,
        "seconds": round(session.seconds, 4),
        "samples_per_second": round(session.rate, 2),
        "train_loss": tally.train_loss,
        "test_loss": found.get("loss"),
        "test_accuracy": found.get("accuracy"),
        "metrics": {name: value for name, value in found.items() if name not in ("loss", "accuracy")},
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
