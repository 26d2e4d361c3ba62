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
    """The center listens at an address; workers join from any host, and may leave and return at any time.

    Choose it when one machine is not enough: start workers on the others by hand, over ssh, or with Slurm's srun.
    Not on a single machine: local does the same without a port.
    """

    def alone(self) -> Network:
        """Return the same engine with one worker, which is started here if any was."""
        return replace(self, workers=1, here=min(self.here, 1), min_workers=None)

    def threads_for(self, learner: Learner) -> int:
        """Return the number of threads of a worker that this process starts."""
        return self.threads_each

    def prepare(self) -> None:
        """Begin the slow parts of the start, in the background, before ``run``."""
        transport.default()
        forkserver.server()

    def check(self, job: Job, learner: Learner) -> None:
        """Raise if this engine cannot do what the job asks for."""
        name = type(job.scheme).__name__
        if is_shared(job.scheme):
            raise UsageError(f"The workers of {name} share their weights, which a network does not allow: use engine local.")
        if job.scheme.early == "queue":
            raise UsageError(
                f"{job.scheme!r} ends windows by the center's queue, which a worker on another machine cannot see: use engine "
                "local."
            )
        if isinstance(job.train, Generated):
            raise UsageError(
                f"{job.train.what} gives its rows once, to one process: workers elsewhere cannot read them. Use engine local, "
                "or rows in files."
            )
        coordinator.check(job, learner, self.shards, by_hand=self.shards_elsewhere > 0)
        devices.check(self.device, job.make_learner)

    def recall(self, directory: Path) -> Checkpoint | None:
        """Return the state that a killed center has left in a run directory; None if there is none."""
        return slice_file.completed(directory, durable_state.left_in(directory))

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        """Train, from the weights of ``learner``; return the center as it is in the end."""
        with one_thread():
            loop = NetworkLoop(self, job, session, learner)
            with loop:
                loop.run()
            return loop.center
