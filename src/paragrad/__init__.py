"""Parallel gradient descent for PyTorch and Keras: the public names, loaded when first used."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paragrad import codecs, engines, schemes

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paragrad.check import check_scheme as check_scheme
    from paragrad.checkengine import check_engine as check_engine
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
    from paragrad.codecs import BF16 as BF16
    from paragrad.codecs import FP16 as FP16
    from paragrad.codecs import Int8 as Int8
    from paragrad.codecs import OneBit as OneBit
    from paragrad.codecs import Threshold as Threshold
    from paragrad.codecs import TopK as TopK
    from paragrad.codecs.codec import Codec as Codec
    from paragrad.data.generated import Generated as Generated
    from paragrad.data.source import Source as Source
    from paragrad.data.source import Weighted as Weighted
    from paragrad.data.stream import Pieces as Pieces
    from paragrad.data.stream import Streamed as Streamed
    from paragrad.data.table import Table as Table
    from paragrad.data.transforms.categories import LabelIndex as LabelIndex
    from paragrad.data.transforms.categories import OneHot as OneHot
    from paragrad.data.transforms.missing import Missing as Missing
    from paragrad.data.transforms.reshape import Reshape as Reshape
    from paragrad.data.transforms.scales import Clip as Clip
    from paragrad.data.transforms.scales import Log as Log
    from paragrad.data.transforms.scales import MinMax as MinMax
    from paragrad.data.transforms.scales import Standardise as Standardise
    from paragrad.data.transforms.transform import Transform as Transform
    from paragrad.engines import Local as Local
    from paragrad.engines import Network as Network
    from paragrad.engines import Vector as Vector
    from paragrad.errors import Diverged as Diverged
    from paragrad.errors import Interrupted as Interrupted
    from paragrad.errors import NotReplayed as NotReplayed
    from paragrad.errors import NotWritten as NotWritten
    from paragrad.errors import ParagradError as ParagradError
    from paragrad.errors import ReadError as ReadError
    from paragrad.errors import UsageError as UsageError
    from paragrad.errors import WorkerError as WorkerError
    from paragrad.fit import fit as fit
    from paragrad.joining import join as join
    from paragrad.learners.keras import KerasLearner as KerasLearner
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
    from paragrad.schemes import ADAG as ADAG
    from paragrad.schemes import AEASGD as AEASGD
    from paragrad.schemes import AGN as AGN
    from paragrad.schemes import DCASGD as DCASGD
    from paragrad.schemes import EAMSGD as EAMSGD
    from paragrad.schemes import EASGD as EASGD
    from paragrad.schemes import GEM as GEM
    from paragrad.schemes import AsyncDiLoCo as AsyncDiLoCo
    from paragrad.schemes import BackupWorkers as BackupWorkers
    from paragrad.schemes import DeanDownpour as DeanDownpour
    from paragrad.schemes import DiLoCo as DiLoCo
    from paragrad.schemes import Downpour as Downpour
    from paragrad.schemes import DynSGD as DynSGD
    from paragrad.schemes import Hogwild as Hogwild
    from paragrad.schemes import ModelAveraging as ModelAveraging
    from paragrad.schemes import OrMo as OrMo
    from paragrad.schemes import SoftSync as SoftSync
    from paragrad.schemes import StalenessAware as StalenessAware
    from paragrad.schemes import SyncSGD as SyncSGD
    from paragrad.schemes.scheme import Scheme as Scheme
    from paragrad.train import train as train
    from paragrad.trained import Trained as Trained
    from paragrad.trained import load as load
    from paragrad.types import CenterView as CenterView
    from paragrad.types import Commit as Commit
    from paragrad.types import Event as Event
    from paragrad.types import Reply as Reply

_HOMES = {
    "train": "train",
    "join": "joining",
    "load": "trained",
    "Trained": "trained",
    "fit": "fit",
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
    "Codec": "codecs.codec",
    "Learner": "learners.learner",
    "Step": "learners.learner",
    "Source": "data.source",
    "Weighted": "data.source",
    "Table": "data.table",
    "Transform": "data.transforms.transform",
    "Standardise": "data.transforms.scales",
    "MinMax": "data.transforms.scales",
    "Clip": "data.transforms.scales",
    "Log": "data.transforms.scales",
    "Missing": "data.transforms.missing",
    "OneHot": "data.transforms.categories",
    "LabelIndex": "data.transforms.categories",
    "Reshape": "data.transforms.reshape",
    "Streamed": "data.stream",
    "Pieces": "data.stream",
    "Generated": "data.generated",
    "Replica": "replica",
    "TorchLearner": "learners.torch",
    "Optimizer": "optim.choice",
    "ConjugateGradient": "optim.conjugate",
    "KerasLearner": "learners.keras",
    "check_scheme": "check",
    "check_engine": "checkengine",
    "CenterView": "types",
    "Commit": "types",
    "Reply": "types",
    "Event": "types",
    "ParagradError": "errors",
    "UsageError": "errors",
    "WorkerError": "errors",
    "ReadError": "errors",
    "Diverged": "errors",
    "Interrupted": "errors",
    "NotReplayed": "errors",
    "NotWritten": "errors",
    **{name: f"schemes.{module}" for name, module in schemes.TABLE.items()},
    **{name: f"codecs.{module}" for name, module in codecs.TABLE.items()},
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
