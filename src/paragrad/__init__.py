"""Parallel gradient descent for PyTorch and Keras: the public names, loaded when first used."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paragrad import engines, schemes

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paragrad.check import check_scheme as check_scheme
    from paragrad.cluster import CenterCrash as CenterCrash
    from paragrad.cluster import Churn as Churn
    from paragrad.cluster import Cluster as Cluster
    from paragrad.cluster import Crash as Crash
    from paragrad.cluster import DropMessage as DropMessage
    from paragrad.cluster import DuplicateMessage as DuplicateMessage
    from paragrad.cluster import Exponential as Exponential
    from paragrad.cluster import Join as Join
    from paragrad.cluster import Leave as Leave
    from paragrad.cluster import LogNormal as LogNormal
    from paragrad.cluster import Partition as Partition
    from paragrad.cluster import Pause as Pause
    from paragrad.cluster import Slow as Slow
    from paragrad.cluster import Trace as Trace
    from paragrad.data.source import Source as Source
    from paragrad.engines import Local as Local
    from paragrad.engines import Vector as Vector
    from paragrad.errors import Diverged as Diverged
    from paragrad.errors import Interrupted as Interrupted
    from paragrad.errors import NotReplayed as NotReplayed
    from paragrad.errors import NotWritten as NotWritten
    from paragrad.errors import ParagradError as ParagradError
    from paragrad.errors import UsageError as UsageError
    from paragrad.errors import WorkerError as WorkerError
    from paragrad.learners.learner import Learner as Learner
    from paragrad.learners.learner import Step as Step
    from paragrad.learners.torch import TorchLearner as TorchLearner
    from paragrad.optim.choice import Optimizer as Optimizer
    from paragrad.optim.conjugate import ConjugateGradient as ConjugateGradient
    from paragrad.replay import Replayed as Replayed
    from paragrad.replay import replay as replay
    from paragrad.replica import Replica as Replica
    from paragrad.result import Result as Result
    from paragrad.run import Run as Run
    from paragrad.run import Stop as Stop
    from paragrad.schemes import *  # noqa: F403
    from paragrad.schemes.scheme import Scheme as Scheme
    from paragrad.train import train as train
    from paragrad.types import CenterView as CenterView
    from paragrad.types import Commit as Commit
    from paragrad.types import Event as Event
    from paragrad.types import Reply as Reply

_HOMES = {
    "train": "train",
    "replay": "replay",
    "Replayed": "replay",
    "Result": "result",
    "Run": "run",
    "Stop": "run",
    "Cluster": "cluster",
    "Crash": "cluster",
    "Pause": "cluster",
    "Slow": "cluster",
    "Leave": "cluster",
    "Join": "cluster",
    "Partition": "cluster",
    "CenterCrash": "cluster",
    "DropMessage": "cluster",
    "DuplicateMessage": "cluster",
    "Churn": "cluster",
    "Exponential": "cluster",
    "LogNormal": "cluster",
    "Trace": "cluster",
    "Scheme": "schemes.scheme",
    "Learner": "learners.learner",
    "Step": "learners.learner",
    "Source": "data.source",
    "Replica": "replica",
    "TorchLearner": "learners.torch",
    "Optimizer": "optim.choice",
    "ConjugateGradient": "optim.conjugate",
    "check_scheme": "check",
    "CenterView": "types",
    "Commit": "types",
    "Reply": "types",
    "Event": "types",
    "ParagradError": "errors",
    "UsageError": "errors",
    "WorkerError": "errors",
    "Diverged": "errors",
    "Interrupted": "errors",
    "NotReplayed": "errors",
    "NotWritten": "errors",
    **{name: f"schemes.{module}" for name, module in schemes.TABLE.items()},
    **{name: f"engines.{module}" for module, name in engines.TABLE.values()},
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paragrad' has no attribute {name!r}")
    value = getattr(import_module(f"paragrad.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _Package(ModuleType):
    """Importing the module ``paragrad.train`` must not hide the function ``paragrad.train`` behind it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """By name: a function of the user's that says ``pg.`` travels to the workers with this module in it."""
        return import_module, (__name__,)


sys.modules[__name__].__class__ = _Package
