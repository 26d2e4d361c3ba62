"""Supervises the shards of a center in other processes: starts and fills them, restarts a killed one."""

from __future__ import annotations

import contextlib
import os
import select
import time
from functools import partial
from typing import Any, Protocol

import torch

from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.engines.process.children import Child, Children
from paragrad.engines.process.launcher import describe_exit, is_stopped
from paragrad.engines.process.task import Role, Task
from paragrad.engines.sharding.coordinator import ShardCoordinator, cuts
from paragrad.engines.sharding.process import ServesShard
from paragrad.engines.transport import endpoint, transport
from paragrad.engines.transport.connection import DEADLINE
from paragrad.engines.transport.message import PROTOCOL, Refused, TransportError
from paragrad.engines.transport.transport import Channel
from paragrad.errors import ParagradError
from paragrad.rundir.session import Session

DEATHS = 3
"""Deaths of one shard without an update in between that end the run."""
BY_HAND = 600.0
"""Seconds to wait for a shard that was started by hand and cannot be reached."""
PATIENCE = 60.0
"""Seconds that a shard may take until it listens. A living one that cannot be reached has three times as long."""


class ShardHost(Protocol):
    """The part of the center's loop that a supervisor of shards uses."""

    session: Session
    center: Center
    children: Children

    def task(self, name: str, role: Role, *, threads: int = 1) -> Task:
        """Return a task for a child of this process."""

    def publish_shards(self, shards: list[tuple[int, int, str]]) -> None:
        """Publish where the shards are: to workers, and in endpoint.json."""


class ShardSupervisor:
    """All shards except the first, which is the center's own process: index k here is shard k + 1."""

    def __init__(
        self,
        host: ShardHost,
        job: Job,
        weights: torch.Tensor,
        *,
        shards: int,
        elsewhere: int,
        address: str,
        name: str,
        token: str,
        pair: tuple[bytes, bytes] | None,
        own_certificate: bool,
        announced: dict[int, str | None],
    ) -> None:
        """``elsewhere``: number of the last shards, which are started by hand; their addresses appear in ``announced``. Shards
        listen at the host of ``address``, which other machines reach by its ``name``."""
        self._host = host
        self._shards = shards
        self._own = shards - 1 - elsewhere
        self._weights = weights
        self._cuts = cuts(weights.numel(), shards, job.codec)
        self.first = self._cuts[1]
        """End of the center's own slice."""
        self.start_id = os.urandom(8).hex()
        self._listen_host = endpoint.split_address(address)[0]
        self._name, self._token, self._pair, self._own_certificate = name, token, pair, own_certificate
        self._announced = announced
        announced.update(dict.fromkeys(range(shards - elsewhere, shards)))
        self._coordinator: ShardCoordinator | None = None
        self._children: list[Child] = []
        self._ports: dict[int, int] = {}
        """Ports that started shards have reported, by index."""
        self._addresses: list[str] = []
        self._channels: list[Channel] = []
        self._deaths = [0] * (shards - 1)
        self._clocks = [0] * (shards - 1)
        self._unreached: dict[int, tuple[float, float]] = {}
        """First and last time of the failed attempts to reach a living shard, by index."""

    # -- life -----------------------------------------------------------------------------------------------

    def attach(self, center: Center) -> None:
        """Attach the shards to a center, before a resumed run restores it."""
        center.remote = self._coordinator = ShardCoordinator(center, self._weights, self._cuts, self.start_id)

    def begin(self) -> bool:
        """Start the processes, wait for those that are started by hand, and fill all of them. Return False if the run was
        stopped meanwhile."""
        assert self._coordinator is not None
        self._children = [self._start(k) for k in range(self._own)]
        self._addresses = [self._wait_until_listening(k) for k in range(self._own)]
        for k in range(self._own, self._shards - 1):
            address = self._wait_for_announcement(k)
            if address is None:
                return False
            self._addresses.append(address)
        self._channels = [self._connect(address) for address in self._addresses]
        self._publish()
        self._coordinator.begin(self._channels, self._mend)
        return True

    def _wait_for_announcement(self, k: int) -> str | None:
        session = self._host.session
        if self._announced[k + 1] is None and session.stopped is None:
            session.emit("note", message=f"Waiting for: paragrad shard {session.directory} --index {k + 1}")
        while self._announced[k + 1] is None and session.stopped is None:
            time.sleep(0.1)
        return self._announced[k + 1]

    def end(self, *, at_once: bool) -> None:
        """Copy the slices back to the center, so that the shards may end; not if everything ends ``at_once``."""
        assert self._coordinator is not None
        failure = ParagradError("The shards were ended before their slices were copied back.") if at_once else None
        if not at_once:
            try:
                self._take_back()
            except ParagradError as error:
                failure = error
        self._coordinator.close(failure)

    def _take_back(self) -> None:
        self._host.center.reunite()
        for channel in self._channels[self._own :]:
            with contextlib.suppress(TransportError, Refused):
                channel.ask("end", {"protocol": PROTOCOL, "start_id": self.start_id}, timeout=DEADLINE)

    @property
    def known(self) -> dict[str, Any]:
        """The entry of the shards in the center's durable state."""
        return {"start_id": self.start_id, "count": self._shards}

    # -- processes ------------------------------------------------------------------------------------------

    def mind(self) -> None:
        """Reconnect to a shard that was restarted by hand with another address."""
        for k in range(self._own, len(self._channels)):
            address = self._announced[k + 1]
            if address is not None and address != self._addresses[k]:
                self._move(k, address)

    def _start(self, k: int, *, incarnation: int = 0, before: str | None = None) -> Child:
        host, ports = self._host, (0,) if before is None else (endpoint.split_address(before)[1], 0)
        directory = host.session.directory.resolve()
        addresses = tuple(endpoint.address_of(self._listen_host, port) for port in ports)
        role = ServesShard(k + 1, self.start_id, directory, addresses, self._token, self._pair)
        self._ports.pop(k, None)
        child = host.children.start(
            host.task(f"shard-{k + 1}", role),
            on_exit=partial(self._on_exit, k),
            on_note=partial(self._on_note, k),
            incarnation=incarnation,
        )
        host.session.emit("shard", index=k + 1, pid=child.process.pid, incarnation=incarnation)
        return child

    def _on_note(self, k: int, kind: str, what: Any) -> None:
        if kind == "listening":
            self._ports[k] = what

    def _on_exit(self, k: int, child: Child) -> None:
        """Restart a shard that has ended between two requests."""
        if self._channels and self._children[k] is child:
            self._restart(k)

    def _wait_until_listening(self, k: int) -> str:
        """Wait until a started shard listens; return its address."""
        child, until = self._children[k], time.monotonic() + PATIENCE
        assert child.notes is not None
        ready = select.poll()
        ready.register(child.notes.fd, select.POLLIN)
        while time.monotonic() < until:
            child.read_notes()
            if k in self._ports:
                return endpoint.address_of(self._name, self._ports[k])
            if child.error is not None:
                raise ParagradError(f"Shard {k + 1} could not start.\n\n{child.error['text'].rstrip()}")
            if child.notes.ended:
                break
            ready.poll(500)
        raise TransportError(f"Shard {k + 1} does not listen.")

    def _connect(self, address: str) -> Channel:
        pem = None if self._pair is None else self._pair[0]
        hostname = self._name if self._own_certificate else None
        return transport.default().connect(address, self._token, pem, hostname=hostname)

    def _mend(self, k: int, error: TransportError) -> None:
        """Handle a shard that cannot be reached: restart it if it was killed, else wait for some time."""
        now, patience = time.monotonic(), 3 * PATIENCE
        if k < self._own:
            child = self._children[k]
            if is_stopped(child.process):
                child.process.kill()
                child.process.join()
            if not child.process.is_alive():
                self._restart(k)
                return
        else:
            patience = BY_HAND
            self.mind()
        first, last = self._unreached.get(k, (now, now))
        first = first if now - last < PATIENCE else now
        self._unreached[k] = first, now
        if now - first > patience:
            raise ParagradError(f"Shard {k + 1} cannot be reached: {error} Resume from the last checkpoint.") from None
        time.sleep(0.1)

    def _restart(self, k: int) -> None:
        """Start another process for a shard that was killed; it continues from the memory that was left."""
        host, child = self._host, self._children[k]
        host.children.release(child)
        child.process.join()
        reason, clock = describe_exit(child.process), host.center.clock
        self._deaths[k] = 1 if clock > self._clocks[k] else self._deaths[k] + 1
        self._clocks[k] = clock
        log = host.session.directory / "logs" / f"shard-{k + 1}.log"
        if self._deaths[k] >= DEATHS:
            raise ParagradError(f"Shard {k + 1} {reason} {DEATHS} times without an update in between. Its log is {log}.")
        host.session.emit("warning", message=f"Shard {k + 1} {reason}; restarting it.")
        self._children[k] = self._start(k, incarnation=child.incarnation + 1, before=self._addresses[k])
        address = self._wait_until_listening(k)
        self._unreached.pop(k, None)
        self._move(k, address)

    def _move(self, k: int, address: str) -> None:
        """Reconnect to a shard at its present address, and publish it."""
        self._channels[k].close()
        self._addresses[k], self._channels[k] = address, self._connect(address)
        self._publish()

    def _publish(self) -> None:
        assert self._coordinator is not None
        places = zip(self._coordinator.slices, self._addresses, strict=True)
        self._host.publish_shards([(lo, hi, address) for (lo, hi), address in places])
