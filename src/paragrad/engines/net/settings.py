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
    """Settings of a center that listens: its address, who may join, and what happens to lost workers."""

    workers: int = 2
    """Largest number of workers at a time."""
    address: str = "127.0.0.1:0"
    """Address to listen at, such as 0.0.0.0:7000; port 0 takes any free port. Only this machine can reach 127.0.0.1."""
    token: str | None = field(default=None, repr=False, metadata={options.APART: True})
    """Secret that workers must know; by default a random one, in the file token of the run directory."""
    min_workers: int | None = None
    """Begin once this many workers have joined. [default: all]"""
    here: int = 0
    """Workers that this process starts itself, on this machine; the others join."""
    shared: bool = True
    """Workers on the center's machine use its memory instead of the network."""
    tls: Literal["auto", "on", "off"] = "auto"
    """Encrypt the connection; auto: if other machines can reach the address."""
    certificate: str | None = None
    """Your own certificate, a PEM file. By default one is made, and workers that read endpoint.json trust only that one."""
    key: str | None = None
    """Private key of the certificate."""
    advertise: str | None = None
    """Name by which workers reach this host. [default: that of the address, or of the host]"""
    replace_after: float = 5.0
    """Seconds without a sign of life after which the others no longer wait for a worker."""
    threads: int | None = None
    """Threads of each worker that this process starts; by default the cores are divided among them."""
    on_failure: Literal["raise", "replace"] = "raise"
    """Effect of a worker's exception: end the run, or give its rank to another worker."""
    device: str = "cpu"
    """Device for the models of workers that this process starts."""
    shards: int = 1
    """Processes that hold a slice of the center each, on their own ports. With 2 or more, ``shared`` has no effect."""
    shards_elsewhere: int = 0
    """How many of the shards, the last ones, you start by hand on other machines: paragrad shard DIR --index K."""
    launcher: Launcher | None = field(default=None, metadata={options.APART: True})
    """Starts the ``here`` workers; by default they are children of this process."""

    def __post_init__(self) -> None:
        least = self.workers if self.min_workers is None else self.min_workers
        if self.workers < 1:
            raise UsageError(f"workers={self.workers}, but at least 1 is needed.")
        if not 1 <= least <= self.workers:
            raise UsageError(f"min_workers={self.min_workers}, but it must be 1 to {self.workers} (workers).")
        if not 0 <= self.here <= self.workers:
            raise UsageError(f"here={self.here}, but it must be 0 to {self.workers} (workers).")
        if (self.certificate is None) != (self.key is None):
            raise UsageError("certificate and key belong together: give both, or neither.")
        if self.token is not None and len(self.token) < 16:
            raise UsageError(f"The token has {len(self.token)} characters, but at least 16 are needed.")
        if self.tls not in ("auto", "on", "off"):
            raise UsageError(f"tls={self.tls!r}, but it must be auto, on or off.")
        if self.on_failure not in ("raise", "replace"):
            raise UsageError(f"on_failure={self.on_failure!r}, but it must be 'raise' or 'replace'.")
        if self.replace_after <= 0:
            raise UsageError(f"replace_after={self.replace_after}, but it must be a number of seconds above 0.")
        if self.shards < 1:
            raise UsageError(f"shards={self.shards}, but the center needs at least 1 process.")
        if not 0 <= self.shards_elsewhere < self.shards:
            raise UsageError(
                f"shards_elsewhere={self.shards_elsewhere}, but it must be 0 to {self.shards - 1}: one shard is in the "
                "center's process."
            )
        if self.shards_elsewhere and self.certificate is not None:
            raise UsageError("Your own certificate is for one host: leave it out if shards run on other hosts.")
        endpoint.split_address(self.address)

    @property
    def threads_each(self) -> int:
        """Threads of each worker that this process starts."""
        return self.threads or max(1, devices.usable_cores() // max(1, self.here))

    def certificate_pair(self, directory: Path) -> tuple[bytes, bytes] | None:
        """Return the center's certificate and key; None if it does not encrypt."""
        if self.certificate is not None and self.key is not None:
            return endpoint.read_pair(self.certificate, self.key)
        host, _ = endpoint.split_address(self.address)
        if self.tls == "off" or (self.tls == "auto" and endpoint.is_loopback(host)):
            return None
        return endpoint.self_signed(directory)
