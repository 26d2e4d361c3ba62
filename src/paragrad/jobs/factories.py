"""Functions that make a worker's learner from a torch module, a compiled Keras model, or a user-defined function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from paragrad.data import load
from paragrad.data.source import leaves, target_of
from paragrad.errors import UsageError
from paragrad.evaluation.card import Head, head_of, keras_head
from paragrad.evaluation.figures import MetricsLike, Outputs, resolved
from paragrad.evaluation.outputs import as_numpy
from paragrad.learners import kerasmodel
from paragrad.learners.batch import has_target
from paragrad.learners.criterion import Loss, refuse_loss
from paragrad.learners.frozen import frozen
from paragrad.learners.keras import KerasLearner
from paragrad.learners.kerascopy import Packed, pack
from paragrad.learners.learner import Learner
from paragrad.learners.measured import Metric
from paragrad.learners.objective import own_loss
from paragrad.learners.torch import TorchLearner
from paragrad.models import losses
from paragrad.models.builtin import is_keras
from paragrad.optim.optimizer import OptimizerLike, prepared
from paragrad.schemes.scheme import Scheme

CPU = "cpu"
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def learner_factory(
    model: Any,
    loss: Loss | str | None,
    optimizer: OptimizerLike | None,
    metrics: MetricsLike | None,
    parts: load.Split,
    scheme: Scheme,
    notes: list[str],
) -> Callable[[str], Learner]:
    """Return a function that makes a learner on a device, from the model, loss and optimiser of the user."""
    if is_keras(model):
        found = resolved(metrics, lambda: _outputs(keras_head(model), None, -1, parts))
        return _keras_factory(model, {"loss": loss, "optimizer": optimizer}, found, parts, notes)
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise UsageError(
                f"model={model!r} is neither a torch module nor a function that makes a Learner. (Names such as 'mlp' are for "
                "the command line; in Python: paragrad.models.builtin.build('mlp', inputs=(64,), outputs=10).)"
            )
        return _carrying(_OwnLearner(model), parts, scheme, notes)
    if isinstance(loss, str):
        loss = losses.build(loss)
    if loss is None or isinstance(loss, losses.OwnLoss):
        loss, sentence = own_loss(model, parts.train, asked=loss is not None) or losses.infer(parts.train)
        notes.append(sentence)
    refuse_loss(loss)
    if scheme.ships == "gradient" and getattr(loss, "reduction", "mean") != "mean":
        raise UsageError(
            f"The loss has reduction={loss.reduction!r}, but {type(scheme).__name__} averages gradients: "  # type: ignore[union-attr]
            "use reduction='mean' (and scale the learning rate)."
        )
    assert optimizer is not None
    found = resolved(metrics, lambda: _outputs_of_module(loss, parts))
    make = partial(_torch_learner, model, loss, prepared(optimizer), found)
    return _carrying(make, parts, scheme, notes)


def _outputs_of_module(loss: Any, parts: load.Split) -> Outputs:
    if isinstance(loss, losses.OwnLoss):
        return _outputs("raw" if loss.shift is None else "softmax", loss, -1, parts)
    batch = parts.train.batch(np.zeros(1, dtype=np.int64))
    return _outputs(head_of(loss, leaves(target_of(batch))[-1] if has_target(batch) else None), loss, None, parts)


def _outputs(head: Head, loss: Any, axis: int | None, parts: load.Split) -> Outputs:
    opened = parts.opened
    if opened is None:
        return Outputs(head, loss, axis)
    fitted, label = opened.fitted, opened.label
    if fitted is None or label is None or not fitted.changes(label):
        return Outputs(head, loss, axis, opened.classes)
    return Outputs(head, loss, axis, opened.classes, lambda values: fitted.invert(label, as_numpy(values).astype(np.float64)))


def _carrying(make: Callable[[str], Learner], parts: load.Split, scheme: Scheme, notes: list[str]) -> Callable[[str], Learner]:
    """Let learners carry the parameters that require no gradient but change in training."""
    trial = make(CPU)
    if not isinstance(trial, TorchLearner) or not frozen(trial.module):
        return make
    batch = parts.train.batch(np.arange(min(2, len(parts.train)), dtype=np.int64))
    names = trial.try_step(batch, at_center=scheme.ships == "gradient")
    if not names:
        return make
    count = sum(parameter.numel() for name, parameter in frozen(trial.module).items() if name in names)
    notes.append(
        f"{count:,} values of parameters that require no gradient change in training ({', '.join(names[:3])}"
        f"{', ...' * (len(names) > 3)}): workers exchange them like batch-norm statistics."
    )
    return _Carrying(make, names)


def _keras_factory(
    model: Any, given: Mapping[str, Any], metrics: dict[str, Metric], parts: load.Split, notes: list[str]
) -> Callable[[str], Learner]:
    kerasmodel.refuse(model)
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"{name}={value!r} is given, but the Keras model was compiled with its own: leave {name} out, or call "
                f"model.compile({name}=...)."
            )
    trial = pack(model).open()
    with kerasmodel.library().device(CPU):  # copies are on the CPU; Keras would use a GPU if there is one
        KerasLearner.build_on(trial, parts.train.batch(np.arange(min(2, len(parts.train)), dtype=np.int64)))
    why = kerasmodel.why_not_saved(trial)
    if why is not None:
        notes.append(
            f"Keras cannot write this model as .keras ({why}): the run directory has its weights only as model.safetensors."
        )
    return partial(_keras_learner, pack(trial), metrics)


def check_device(make: Callable[[str], Learner], device: str) -> None:
    """Raise if a user-defined function cannot make a learner on this device; the run would silently use another one."""
    own = make.make if isinstance(make, _Carrying) else make
    if isinstance(own, _OwnLearner) and device != CPU:
        own(device)


def made_on(device: str, make: Callable[..., Any]) -> Any:
    """Call a user-defined function, with the device if it has a parameter for it."""
    if _takes_device(make):
        return make(device=device)
    if device == CPU:
        return make()
    raise UsageError(
        f"device={device!r}, but the function given as model has no parameter device: its learner would compute elsewhere. "
        "Write it as make(device) that returns pg.TorchLearner(..., device=device), or use device='cpu'."
    )


def _takes_device(make: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # some callables in C have no signature
        return False
    return any(each.kind is each.VAR_KEYWORD or (each.name == "device" and each.kind in BY_NAME) for each in parameters)


@dataclass(frozen=True)
class _OwnLearner:
    make: Callable[..., Learner]

    def __call__(self, device: str) -> Learner:
        learner = made_on(device, self.make)
        if not isinstance(learner, Learner):
            raise UsageError(
                f"The function given as model returned {type(learner).__name__}, which is not a Learner (see pg.Learner)."
            )
        if isinstance(learner, TorchLearner) and learner.device.type != torch.device(device).type:
            raise UsageError(
                f"The function given as model was asked for a learner on {device!r}, but returned one on "
                f"{str(learner.device)!r}. Pass the parameter on: pg.TorchLearner(..., device=device)."
            )
        return learner


@dataclass(frozen=True)
class _Carrying:
    make: Callable[[str], Learner]
    names: tuple[str, ...]

    def __call__(self, device: str) -> Learner:
        learner = self.make(device)
        assert isinstance(learner, TorchLearner)
        learner.carry(self.names)
        return learner


def _torch_learner(
    module: nn.Module, loss: Loss, optimizer: OptimizerLike, metrics: dict[str, Metric], device: str
) -> TorchLearner:
    return TorchLearner(module, loss, optimizer, metrics=metrics, device=device)


def _keras_learner(packed: Packed, metrics: dict[str, Metric], device: str) -> KerasLearner:
    return KerasLearner(packed, metrics=metrics, device=device)
