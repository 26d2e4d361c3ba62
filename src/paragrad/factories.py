"""What builds a worker's learner from what a user gave: a torch module, a compiled Keras model, or a function making one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import nn

from paragrad import losses
from paragrad.data import load
from paragrad.errors import UsageError
from paragrad.learners import kerasmodel
from paragrad.learners.keras import KerasLearner
from paragrad.learners.kerascopy import Packed, pack
from paragrad.learners.learner import Learner
from paragrad.learners.torch import Loss, Metric, TorchLearner
from paragrad.models import is_keras
from paragrad.optim.optimizer import OptimizerLike, prepared
from paragrad.schemes.scheme import Scheme


def learner_factory(
    model: Any,
    loss: Loss | str | None,
    optimizer: OptimizerLike | None,
    metrics: Mapping[str, Metric] | None,
    parts: load.Split,
    scheme: Scheme,
    notes: list[str],
) -> Callable[[str], Learner]:
    """What builds a worker's learner on a device, from what a user gave as model, loss and optimiser."""
    if is_keras(model):
        return _keras_factory(model, {"loss": loss, "optimizer": optimizer, "metrics": metrics}, parts, notes)
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise UsageError(
                f"model={model!r} is neither a torch module nor a function that makes a Learner. (Names such as 'mlp' are for "
                "the command line; here: paragrad.models.build('mlp', inputs=(64,), outputs=10).)"
            )
        return _OwnLearner(model)
    if isinstance(loss, str):
        loss = losses.build(loss)
    if loss is None:
        loss, sentence = losses.infer(parts.train)
        notes.append(sentence)
    if scheme.ships == "gradient" and getattr(loss, "reduction", "mean") != "mean":
        raise UsageError(
            f"The loss has reduction={loss.reduction!r}, but {type(scheme).__name__} averages gradients: "  # type: ignore[union-attr]
            "use reduction='mean' (and scale the learning rate)."
        )
    assert optimizer is not None
    return _ModuleLearner(model, loss, prepared(optimizer), dict(metrics or {}))


def _keras_factory(model: Any, given: Mapping[str, Any], parts: load.Split, notes: list[str]) -> Callable[[str], Learner]:
    kerasmodel.refuse(model)
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"{name}={value!r} is given beside a Keras model, which was compiled with its own: leave {name} out, or call "
                f"model.compile({name}=...)."
            )
    trial = pack(model).open()
    with kerasmodel.library().device("cpu"):  # where copies are; Keras would else take a GPU that it finds
        KerasLearner.build_on(trial, parts.train.batch(np.arange(min(2, len(parts.train)), dtype=np.int64)))
    why = kerasmodel.why_not_saved(trial)
    if why is not None:
        notes.append(
            f"Keras cannot write this model as .keras ({why}): the run directory gets its weights as model.safetensors only."
        )
    return _KerasModel(pack(trial))


class _OwnLearner:
    def __init__(self, make: Callable[[], Learner]) -> None:
        self._make = make

    def __call__(self, device: str) -> Learner:
        learner = self._make()
        if not isinstance(learner, Learner):
            raise UsageError(
                f"The function given as model returned {type(learner).__name__}, which is not a Learner (see pg.Learner)."
            )
        return learner


class _ModuleLearner:
    def __init__(self, module: nn.Module, loss: Loss, optimizer: OptimizerLike, metrics: dict[str, Metric]) -> None:
        self._parts = (module, loss, optimizer)
        self._metrics = metrics

    def __call__(self, device: str) -> Learner:
        return TorchLearner(*self._parts, metrics=self._metrics, device=device)


class _KerasModel:
    def __init__(self, packed: Packed) -> None:
        self._packed = packed

    def __call__(self, device: str) -> Learner:
        return KerasLearner(self._packed, device=device)
