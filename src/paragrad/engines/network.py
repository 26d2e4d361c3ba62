"""The network engine: the center listens, workers join from anywhere and leave at any time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.data.generated import Generated
from paragrad.engines.exchange.center_loop import one_thread
from paragrad.engines.net import durable_state
from paragrad.engines.net.center_loop import NetworkLoop
from paragrad.engines.net.settings import NetworkSettings
from paragrad.engines.process import devices, forkserver
from paragrad.engines.sharding import coordinator, slice_file
from paragrad.engines.transport import transport
from paragrad.errors import UsageError
from paragrad.learners.learner import Learner
from paragrad.rundir.checkpoint import Checkpoint
from paragrad.rundir.session import Session
from paragrad.schemes.traits import is_shared


@dataclass(frozen=True)
class Network(NetworkSettings):
    """The center listens at an address; workers join from any host, and may leave and come at any time.

    Choose it when one machine is not enough: workers are started on the others by hand, over ssh, or by Slurm's srun.
    Not on one machine alone: local does the same without a port.
    """

    def alone(self) -> Network:
        """The same with one worker, which is started here if any was."""
        return replace(self, workers=1, here=min(self.here, 1), min_workers=None)

    def threads_for(self, learner: Learner) -> int:
        """Threads that a worker's model computes with, where this process starts it."""
        return self.threads_each

    def prepare(self) -> None:
        """Begin to start what takes time, beside whatever else is done before ``run``."""
        transport.default()
        forkserver.server()

    def check(self, job: Job, learner: Learner) -> None:
        """Raise where this engine cannot do what the job asks for."""
        name = type(job.scheme).__name__
        if is_shared(job.scheme):
            raise UsageError(f"The workers of {name} share their weights, which they cannot over a network: use engine local.")
        if job.scheme.early == "queue":
            raise UsageError(
                f"{job.scheme!r} ends windows by the center's queue, which a worker on another machine cannot see: use engine "
                "local."
            )
        if isinstance(job.train, Generated):
            raise UsageError(
                f"{job.train.what} gives its rows once, to one process: workers elsewhere cannot have them. Use engine local, "
                "or rows in files."
            )
        coordinator.check(job, learner, self.shards, by_hand=self.shards_elsewhere > 0)
        devices.check(self.device, job.make_learner)

    def recall(self, directory: Path) -> Checkpoint | None:
        """What a center that was killed has left in a run directory."""
        return slice_file.completed(directory, durable_state.left_in(directory))

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        """Train; returns the center as it is in the end. ``learner`` gives the starting point."""
        with one_thread(), NetworkLoop(self, job, session, learner) as loop:
            loop.run()
            return loop.center
