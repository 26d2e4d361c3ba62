"""The vector engine: all workers in this process, under a virtual clock; one device computes their windows together."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager
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
"""Parameters above which a CPU computes windows one after another: one model then keeps its cores busy."""
LARGE_IN_KERAS = 250_000
"""The same limit for Keras models, whose steps take milliseconds in Python alone."""
COLLECTED = 50_000
"""Threshold of Python's garbage collector during a run."""
CACHED = 2_000_000
"""Largest total number of weights that a CPU computes at once: more would not stay in its cache between steps."""


@dataclass(frozen=True)
class Vector:
    """Any number of workers in one process, on an exactly simulated cluster.

    Choose it to train a small model with many workers on one GPU, or to test the effect of stragglers, latency and crashes.
    Not for one large model, which keeps the device busy alone.
    """

    workers: int = 4
    """Number of simulated workers."""
    device: str = "cpu"
    """Device that computes all workers: cpu or cuda."""
    cluster: Cluster = field(default_factory=Cluster, metadata={APART: True})
    """The simulated cluster: speeds of the workers, latency and bandwidth of their links, and faults."""
    mode: Literal["auto", "together", "loop"] = "auto"
    """together computes the workers' windows in one batch, and raises if the model does not allow that; loop computes them one
    after another; auto: together if the model allows it and it is faster."""
    precision: Precision = "float32"
    """Precision of matrix products: float32, or tf32 or bf16, which are faster on a GPU."""
    chunk: int | None = None
    """Largest number of workers computed at once; by default as many as fit in memory, or in the cache of a CPU."""
    threads: int | None = None
    """CPU threads of the whole run; by default 1 for a small model, otherwise the cores that this process may use."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"workers={self.workers}, but at least 1 worker is needed.")
        for name in ("chunk", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}, but it must be at least 1.")
        for name, known in (("mode", ("auto", "together", "loop")), ("precision", get_args(Precision))):
            if getattr(self, name) not in known:
                raise UsageError(f"{name}={getattr(self, name)!r}, but it must be one of {', '.join(known)}.")
        if not isinstance(self.cluster, Cluster):
            raise UsageError(f"cluster={self.cluster!r} is not a Cluster; give pg.Cluster(...), or a name on the command line.")
        self.cluster.check(self.workers)

    def threads_for(self, learner: Learner) -> int:
        """Return the number of threads: 1 for a small model, for which a second thread has no benefit."""
        return self.threads or (1 if learner.weights.numel() <= LARGE else devices.usable_cores())

    def prepare(self) -> None:
        """Do nothing: there are no processes to start."""

    def check(self, job: Job, learner: Learner) -> None:
        """Raise if this engine cannot run the job."""
        devices.check(self.device, job.make_learner)
        self._arrange(job, learner)

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        """Train from the learner's weights, and return the center at the end."""
        if is_shared(job.scheme):
            name = type(job.scheme).__name__
            session.emit("note", message=f"{name} is simulated as downpour:window=1: without races, they are the same.")
            job = replace(job, scheme=Downpour(window=1, bound=job.scheme.bound))
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads_for(learner))
        try:
            with closing(self._make_replicas(job, session, learner)) as replicas, Signals(session), _rare_collections():
                return Simulation(job, session, learner, replicas, self.workers, self.cluster).run()
        finally:
            torch.set_num_threads(before)

    def _make_replicas(self, job: Job, session: Session, learner: Learner) -> Replicas:
        reason, chunk = self._arrange(job, learner)
        if reason is None:
            assert _batchable(learner)
            return BatchedReplicas(job, learner, self.workers, self.device, precision=self.precision, chunk=chunk)
        if self.mode != "loop":
            message = f"Workers are computed one after another: {reason}."
            if self.workers == 1 or self._faster_in_a_loop(learner):
                session.emit("note", message=message)
            else:  # a small step takes as long for one worker as for all
                times = f"{self.workers} times as long"
                longer = f"{times}, or longer" if self._on_gpu else f"up to {times}"
                cost = f"With {self.workers} workers on {self.device} this may take {longer}"
                session.emit("warning", message=f"{message} {cost}, compared with all of them together.")
        return SeparateReplicas(job, self.workers, self.device)

    def _arrange(self, job: Job, learner: Learner) -> tuple[str | None, int]:
        """Return why workers are computed one after another (None: together), and how many at once.

        Raises if the workers do not fit into memory.
        """
        reason = self._why_loop(job, learner)
        if self.mode == "together" and reason is not None:
            raise UsageError(f"mode='together', but workers cannot be computed together: {reason}. Leave mode at 'auto'.")
        vector = learner.weights.numel() * learner.weights.element_size()
        # Weights, commit and reply; then the slots of the scheme, the codec's residuals and the optimiser.
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
        return reason, min(self.chunk or most, most)

    def _why_loop(self, job: Job, learner: Learner) -> str | None:
        if self.mode == "loop":
            return "mode is 'loop'"
        if not _batchable(learner):
            return "the Learner is user-defined"
        if isinstance(job.train, Orderly):
            return "the rows are streamed"
        if isinstance(job.train, Items) and not job.train.even:
            return "a user-defined collate function may give mini-batches of different shapes"
        if self.mode == "auto" and self._faster_in_a_loop(learner):
            return f"this is faster on a CPU for a model of {learner.weights.numel():,} parameters"
        return batchable.why_not(learner, job.train, job.plan)

    def _faster_in_a_loop(self, learner: Learner) -> bool:
        large = LARGE_IN_KERAS if isinstance(learner, KerasLearner) else LARGE
        return not self._on_gpu and learner.weights.numel() > large

    @property
    def _on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def _batchable(learner: Learner) -> TypeGuard[Batchable]:
    # A subclass may step in another way.
    return type(learner) in (TorchLearner, KerasLearner)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python collect garbage less often: it takes a tenth of a run, and the run's many objects have few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECTED, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
