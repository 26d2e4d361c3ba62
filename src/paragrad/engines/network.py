"""The network engine: the center listens, workers join from anywhere and leave at any time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from paragrad import options
from paragrad.center import Center
from paragrad.checkpoint import Checkpoint
from paragrad.data.generated import Generated
from paragrad.engines import devices, elsewhere, memory, processes, slicememory
from paragrad.engines.crew import one_thread
from paragrad.engines.networkcrew import NetworkCrew
from paragrad.errors import UsageError
from paragrad.job import Job
from paragrad.learners.learner import Learner
from paragrad.session import Session
from paragrad.transport import endpoint


@dataclass(frozen=True)
class Network:
    """The center listens at an address; workers join from any host, and may leave and come at any time.

    Choose it when one machine is not enough: workers are started on the others by hand, over ssh, or by Slurm's srun.
    Not on one machine alone: local does the same without a port.
    """

    workers: int = 2
    """Places: how many may work at a time."""
    address: str = "127.0.0.1:0"
    """Where the center listens, as 0.0.0.0:7000; port 0: any that is free. Loopback is reached from this machine alone."""
    token: str | None = field(default=None, repr=False, metadata={options.APART: True})
    """What workers must know; by default drawn at random, and in the file token of the run directory."""
    min_workers: int | None = None
    """Begin once so many have joined. [default: all]"""
    here: int = 0
    """Workers that this process starts itself, on this machine; the others join."""
    shared: bool = True
    """Workers on the center's machine use its memory instead of the network."""
    tls: Literal["auto", "on", "off"] = "auto"
    """Whether the connection is encrypted; auto: where the address can be reached from elsewhere."""
    certificate: str | None = None
    """A certificate of your own, as a PEM file; by default one is made, and pinned by workers that read endpoint.json."""
    key: str | None = None
    """Its private key."""
    advertise: str | None = None
    """The name by which workers reach this host. [default: that of the address, or of the host]"""
    replace_after: float = 5.0
    """Seconds until others no longer wait for a worker that is not heard of."""
    threads: int | None = None
    """Threads of each worker that this process starts; by default the cores, shared out."""
    on_failure: Literal["raise", "replace"] = "raise"
    """What a worker's exception does: end the run, or leave its place to another."""
    device: str = "cpu"
    """Where the models of workers that this process starts are."""
    shards: int = 1
    """Processes that the center is spread over, each with a slice of it and a port of its own; from 2 on without ``shared``."""
    shards_elsewhere: int = 0
    """How many of these, the last ones, are started by hand, on other machines: paragrad shard DIR --index K."""

    def __post_init__(self) -> None:
        least = self.workers if self.min_workers is None else self.min_workers
        if self.workers < 1:
            raise UsageError(f"workers={self.workers}, but at least 1 place is needed.")
        if not 1 <= least <= self.workers:
            raise UsageError(f"min_workers={self.min_workers}, but it is 1 to {self.workers}, the number of places (workers).")
        if not 0 <= self.here <= self.workers:
            raise UsageError(f"here={self.here}, but it is 0 to {self.workers}, the number of places (workers).")
        if (self.certificate is None) != (self.key is None):
            raise UsageError("certificate and key belong together: give both, or neither.")
        if self.token is not None and len(self.token) < 16:
            raise UsageError(f"The token has {len(self.token)} characters, but at least 16 are needed.")
        if self.tls not in ("auto", "on", "off"):
            raise UsageError(f"tls={self.tls!r}, but it is auto, on or off.")
        if self.on_failure not in ("raise", "replace"):
            raise UsageError(f"on_failure={self.on_failure!r}, but a failure can 'raise' or 'replace'.")
        if self.replace_after <= 0:
            raise UsageError(f"replace_after={self.replace_after}, but it is a number of seconds above 0.")
        if self.shards < 1:
            raise UsageError(f"shards={self.shards}, but the center lies in at least 1 process.")
        if not 0 <= self.shards_elsewhere < self.shards:
            raise UsageError(
                f"shards_elsewhere={self.shards_elsewhere}, but it is 0 to {self.shards - 1}: one is the center's own process."
            )
        if self.shards_elsewhere and self.certificate is not None:
            raise UsageError("A certificate of your own is for one host: leave it out where shards are on others.")
        endpoint.split_address(self.address)

    @property
    def threads_each(self) -> int:
        """Threads of each worker that this process starts."""
        return self.threads or max(1, processes.usable_cores() // max(1, self.here))

    def alone(self) -> Network:
        """The same with one worker, which is started here if any was."""
        return replace(self, workers=1, here=min(self.here, 1), min_workers=None)

    def threads_for(self, learner: Learner) -> int:
        """Threads that a worker's model computes with, where this process starts it."""
        return self.threads_each

    def prepare(self) -> None:
        """Begin to start what takes time, beside whatever else is done before ``run``."""
        _library()
        processes.server()

    def check(self, job: Job, learner: Learner) -> None:
        """Raise where this engine cannot do what the job asks for."""
        name = type(job.scheme).__name__
        if job.scheme.aliased:
            raise UsageError(f"The workers of {name} share their weights, which they cannot over a network: use engine local.")
        if job.scheme.sees_queue:
            raise UsageError(
                f"{job.scheme!r} ends windows by the center's queue, which a worker on another machine cannot see: use engine "
                "local."
            )
        if isinstance(job.train, Generated):
            raise UsageError(
                f"{job.train.what} gives its rows once, to one process: workers elsewhere cannot have them. Use engine local, "
                "or rows in files."
            )
        elsewhere.check(job, learner, self.shards, by_hand=self.shards_elsewhere > 0)
        devices.check(self.device)

    def recall(self, directory: Path) -> Checkpoint | None:
        """What a center that was killed has left in a run directory."""
        return slicememory.completed(directory, memory.left_in(directory))

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        """Train; returns the center as it is in the end. ``learner`` gives the starting point."""
        with one_thread(), NetworkCrew(self, job, session, learner) as crew:
            crew.work()
            return crew.center

    def certificate_pair(self, directory: Path) -> tuple[bytes, bytes] | None:
        """(certificate, key) that the center shows; None: it does not encrypt."""
        if self.certificate is not None and self.key is not None:
            return endpoint.given_pair(self.certificate, self.key)
        host, _ = endpoint.split_address(self.address)
        if self.tls == "off" or (self.tls == "auto" and endpoint.is_loopback(host)):
            return None
        from paragrad.transport.flight import HOSTNAME

        return endpoint.self_signed(directory, HOSTNAME)


def _library() -> None:
    try:
        import paragrad.transport.flight
    except ImportError:
        raise UsageError("Workers over a network need pyarrow, which is missing: pip install 'paragrad[network]'.") from None
    assert paragrad.transport.flight
