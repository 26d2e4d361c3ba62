"""The settings of an engine whose center listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paragrad.config import options
from paragrad.engines.process import devices
from paragrad.engines.process.launcher import Launcher
from paragrad.engines.transport import endpoint
from paragrad.errors import UsageError


@dataclass(frozen=True)
class NetworkSettings:
    """Where the center listens, who may join, and what happens to lost workers."""

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
    launcher: Launcher | None = field(default=None, metadata={options.APART: True})
    """What starts the ``here`` workers; by default they are children of this process."""

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
        return self.threads or max(1, devices.usable_cores() // max(1, self.here))

    def certificate_pair(self, directory: Path) -> tuple[bytes, bytes] | None:
        """(certificate, key) that the center shows; None: it does not encrypt."""
        if self.certificate is not None and self.key is not None:
            return endpoint.given_pair(self.certificate, self.key)
        host, _ = endpoint.split_address(self.address)
        if self.tls == "off" or (self.tls == "auto" and endpoint.is_loopback(host)):
            return None
        return endpoint.self_signed(directory)
