"""The vector engine: all workers in this process, under a virtual clock, their windows computed together on one device."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, TypeGuard, get_args

import torch

from paragrad.cluster import Cluster
from paragrad.config.options import APART
from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.data.source import Items, Orderly
from paragrad.engines.process import devices
from paragrad.engines.process.signals import Signals
from paragrad.engines.sim.replicas import BatchedReplicas, Replicas, SeparateReplicas
from paragrad.engines.sim.simulation import Simulation
from paragrad.errors import UsageError
from paragrad.learners import batchable
from paragrad.learners.keras import KerasLearner
from paragrad.learners.learner import Learner
from paragrad.learners.rowmodel import Batchable
from paragrad.learners.stepper import Precision
from paragrad.learners.torch import TorchLearner
from paragrad.rundir.session import Session
from paragrad.schemes.downpour import Downpour
from paragrad.schemes.traits import is_shared

LARGE = 50_000
"""Parameters from which windows are computed one after another on a CPU: its cores are busy with one model then."""
LARGE_IN_KERAS = 250_000
"""The same for Keras models: a step of one of them takes milliseconds in Python alone."""
COLLECTED = 50_000
"""Objects that are made before Python looks for garbage in cycles."""
CACHED = 2_000_000
"""Weights of workers that are computed at once on a CPU, at most: more would not stay in its cache from step to step."""


@dataclass(frozen=True)
class Vector:
    """Any number of workers in one process, on a cluster that is simulated exactly: fast training of small models on
    one device, and a trial of any cluster before it is booked.

    Choose it to train a small model with many workers on one GPU, or to see what stragglers, latency and crashes would do.
    Not for one large model, which fills the device alone.
    """

    workers: int = 4
    """How many workers are simulated."""
    device: str = "cpu"
    """Where all of them compute: cpu or cuda."""
    cluster: Cluster = field(default_factory=Cluster, metadata={APART: True})
    """How fast the workers are, how far from the center, and what goes wrong when."""
    mode: Literal["auto", "together", "loop"] = "auto"
    """Whether windows are computed together (an error where the model does not allow it) or one after another; auto:
    together where the model allows it and that is faster."""
    precision: Precision = "float32"
    """Of matrix products: float32, or tf32 or bf16, which are faster on a GPU."""
    chunk: int | None = None
    """Most workers that are computed at once; by default as many as memory holds, and on a CPU its cache."""
    threads: int | None = None
    """Threads that all of them compute with on the CPU; by default 1 for a small model, else the cores that this process
    may use."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"workers={self.workers}, but at least 1 worker is needed.")
        for name, least in (("chunk", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name}={value}, but it must be at least {least}.")
        for name, known in (("mode", ("auto", "together", "loop")), ("precision", get_args(Precision))):
            if getattr(self, name) not in known:
                raise UsageError(f"{name}={getattr(self, name)!r}, but it is one of {', '.join(known)}.")
        if not isinstance(self.cluster, Cluster):
            raise UsageError(f"cluster={self.cluster!r} is not a Cluster; give pg.Cluster(...), or a name on the command line.")
        self.cluster.check(self.workers)

    def threads_for(self, learner: Learner) -> int:
        """Threads that a worker's model computes with: for a small one, a second thread is only waited for."""
        return self.threads or (1 if learner.weights.numel() <= LARGE else devices.usable_cores())

    def prepare(self) -> None:
        """There is nothing to start."""

    def check(self, job: Job, learner: Learner) -> None:
        """Raise where this engine cannot do what the job asks for."""
        devices.check(self.device, job.make_learner)
        self._arrange(job, learner)

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        """Train; returns the center as it is in the end. ``learner`` gives the starting point."""
        if is_shared(job.scheme):
            name = type(job.scheme).__name__
            session.emit("note", message=f"{name} without its races is downpour:window=1, which is simulated.")
            job = replace(job, scheme=Downpour(window=1, bound=job.scheme.bound))
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads_for(learner))
        try:
            replicas = self._make_replicas(job, session, learner)
            try:
                with Signals(session), _seldom_collected():
                    return Simulation(job, session, learner, replicas, self.workers, self.cluster).run()
            finally:
                replicas.close()
        finally:
            torch.set_num_threads(before)

    def _make_replicas(self, job: Job, session: Session, learner: Learner) -> Replicas:
        arranged = self._arrange(job, learner)
        if arranged.reason is None:
            assert _batchable(learner)
            return BatchedReplicas(job, learner, self.workers, self.device, precision=self.precision, chunk=arranged.chunk)
        if self.mode != "loop":
            message = f"Workers are computed one after another: {arranged.reason}."
            if self.workers == 1 or self._faster_in_a_loop(learner):
                session.emit("note", message=message)
            else:
                session.emit("warning", message=f"{message} {self._cost()}")
        return SeparateReplicas(job, self.workers, self.device)

    def _cost(self) -> str:
        """How long one worker after another may take: a small step takes as long for one of them as for all."""
        longer = f"{self.workers} times as long, or longer" if self._on_gpu else f"up to {self.workers} times as long"
        return f"With {self.workers} workers on {self.device} this may take {longer}, compared with all of them together."

    def _arrange(self, job: Job, learner: Learner) -> _Arrangement:
        """Whether windows are computed together, and how many; raises where there is no room for the workers."""
        reason = self._why_loop(job, learner)
        if self.mode == "together" and reason is not None:
            raise UsageError(f"mode='together', but workers cannot be computed together: {reason}. Leave mode at 'auto'.")
        vector = learner.weights.numel() * learner.weights.element_size()
        # Weights, what is sent and what was answered; then what the scheme keeps, and the optimiser.
        kept = 3 + len(job.scheme.worker_slots) + 2 * (job.codec is not None)
        kept += batchable.slots_of(learner) if isinstance(learner, Batchable) else 0
        static = vector * kept * self.workers
        one = vector * (kept + 1)
        if reason is None:
            assert _batchable(learner)
            one += batchable.activations(learner, job.train, job.plan)
        room = devices.room(self.device)
        if static + one > room:
            raise UsageError(
                f"{self.workers} workers of {learner.weights.numel():,} parameters need about {devices.in_words(static)}, and "
                f"{devices.in_words(one)} to compute one of them, but {self.device} has {devices.in_words(room)}: use fewer "
                f"workers (about {max(0, (room - one) // (vector * kept))}), a smaller model or a smaller batch."
            )
        most = int(min(self.workers, (room - static) // one))
        if not self._on_gpu:
            most = min(most, max(1, CACHED // learner.weights.numel()))
        return _Arrangement(reason, min(self.chunk or most, most))

    def _why_loop(self, job: Job, learner: Learner) -> str | None:
        if self.mode == "loop":
            return "that was asked for"
        if not _batchable(learner):
            return "the learner is one of your own"
        if isinstance(job.train, Orderly):
            return "the rows are streamed"
        if isinstance(job.train, Items) and not job.train.even:
            return "a collate of your own may give mini-batches of different shapes"
        if self.mode == "auto" and self._faster_in_a_loop(learner):
            return f"on a CPU that is faster for a model of {learner.weights.numel():,} parameters"
        return batchable.why_not(learner, job.train, job.plan)

    def _faster_in_a_loop(self, learner: Learner) -> bool:
        """Whether one model of this size keeps the device busy."""
        large = LARGE_IN_KERAS if isinstance(learner, KerasLearner) else LARGE
        return not self._on_gpu and learner.weights.numel() > large

    @property
    def _on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def _batchable(learner: Learner) -> TypeGuard[Batchable]:
    """Whether it is a learner of ours, and no subclass, which may step in any way."""
    return type(learner) in (TorchLearner, KerasLearner)


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """A run makes and forgets many small objects, hardly any in a cycle: looking for those so often costs a tenth of it."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECTED, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(frozen=True)
class _Arrangement:
    """How the workers of a run are computed."""

    reason: str | None
    """Why one after another; None: together."""
    chunk: int
    """How many at once."""
