"""Supervises the processes that a center is spread over, besides its own: starts and fills them, restarts a killed one."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Mapping
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
from paragrad.engines.transport.message import PROTOCOL, Refused, TransportError, Vectors, weight
from paragrad.engines.transport.transport import Channel, Header
from paragrad.errors import ParagradError
from paragrad.rundir.session import Session

DEATHS = 3
"""Deaths of one shard without an update in between that end the run."""
BY_HAND = 600.0
"""Seconds in which a shard that was started by hand, and cannot be reached, may be restarted."""
PATIENCE = 60.0
"""Seconds that a shard may take to listen, or not be reached while its process lives."""


class ShardHost(Protocol):
    """What a supervisor of shards asks of the center's loop."""

    session: Session
    center: Center
    children: Children

    def task(self, name: str, role: Role, *, threads: int = 1) -> Task:
        """Return a task for a child of this process."""

    def publish_shards(self, shards: list[tuple[int, int, str]]) -> None:
        """Tell workers, and those who read endpoint.json, where the shards are."""


class _Peer:
    """A shard's address, and the connection to it."""

    def __init__(self, connect: Callable[[str], Channel], address: str) -> None:
        self.address = address
        self.channel = connect(address)

    def ask(self, name: str, header: Mapping[str, Any]) -> Header:
        """Ask a short question."""
        return self.channel.ask(name, header, timeout=DEADLINE)

    def exchange(self, header: Mapping[str, Any], vectors: Vectors, into: Callable[[Header], Vectors]) -> Header:
        """Send a header and vectors, and receive some."""
        return self.channel.exchange(header, vectors, into, timeout=2 * DEADLINE + 2 * weight(vectors) / 1e6)


class ShardSupervisor:
    """All shards but the first, which is the center's own process. Number k of them is shard k + 1."""

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
        """``elsewhere``: so many of the last shards are started by hand, and their addresses appear in ``announced``. Shards
        listen at the host of ``address``, which others know by its ``name``."""
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
        """Ports that started shards have reported."""
        self._peers: list[_Peer] = []
        self._deaths = [0] * (shards - 1)
        self._clocks = [0] * (shards - 1)
        self._unreached: dict[int, tuple[float, float]] = {}
        """Since when, and when last, a shard that lives could not be reached."""

    # -- life -----------------------------------------------------------------------------------------------

    def attach(self, center: Center) -> None:
        """Spread a center, before it is brought to where a resumed run left off."""
        center.remote = self._coordinator = ShardCoordinator(center, self._weights, self._cuts, self.start_id)

    def begin(self) -> bool:
        """Start the processes, which listen where the center does, and fill them; wait for those that are started by hand.
        Return False where a stop was asked for meanwhile."""
        assert self._coordinator is not None
        for k in range(self._own):
            self._children.append(self._start(k))
        addresses = [self._listens(k) for k in range(self._own)]
        for k in range(self._own, self._shards - 1):
            address = self._wait_for(k)
            if address is None:
                return False
            addresses.append(address)
        self._peers = [_Peer(self._connect, address) for address in addresses]
        self._publish()
        self._coordinator.begin(self._peers, self._mend)
        return True

    def _wait_for(self, k: int) -> str | None:
        session, told = self._host.session, False
        while (address := self._announced[k + 1]) is None and session.stopped is None:
            if not told:
                told = True
                session.emit("note", message=f"Waiting for: paragrad shard {session.directory} --index {k + 1}")
            time.sleep(0.1)
        return address

    def end(self, *, at_once: bool) -> None:
        """Take back what the shards hold, so that they may end; not where all end ``at_once``."""
        assert self._coordinator is not None
        failure = ParagradError("The shards were ended before they had given back what they hold.") if at_once else None
        if not at_once:
            try:
                self._take_back()
            except ParagradError as error:
                failure = error
        self._coordinator.close(failure)

    def _take_back(self) -> None:
        self._host.center.reunite()
        for k in range(len(self._children), len(self._peers)):
            with contextlib.suppress(TransportError, Refused):
                self._peers[k].ask("end", {"protocol": PROTOCOL, "start_id": self.start_id})

    @property
    def known(self) -> dict[str, Any]:
        """What the center's durable state says of them."""
        return {"start_id": self.start_id, "count": self._shards}

    # -- processes ------------------------------------------------------------------------------------------

    def mind(self) -> None:
        """Follow a shard that was restarted by hand, and listens elsewhere."""
        for k in range(len(self._children), len(self._peers)):
            address = self._announced[k + 1]
            if address is not None and address != self._peers[k].address:
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
        """Restart a shard that has ended while nothing was asked of it."""
        if self._children[k] is child and self._peers:
            self._revive(k)

    def _listens(self, k: int) -> str:
        """Wait until a shard that was started listens; return its address."""
        child, until = self._children[k], time.monotonic() + PATIENCE
        assert child.notes is not None
        ready = select.poll()
        ready.register(child.notes.fd, select.POLLIN)
        while time.monotonic() < until:
            child.read_notes()
            if k in self._ports:
                return endpoint.address_of(self._name, self._ports[k])
            if child.error is not None:
                raise ParagradError(f"Shard {k + 1} could not begin.\n\n{child.error['text'].rstrip()}")
            if child.notes.ended:
                break
            ready.poll(500)
        raise TransportError(f"Shard {k + 1} has not begun to listen.")

    def _connect(self, address: str) -> Channel:
        pem = None if self._pair is None else self._pair[0]
        hostname = self._name if self._own_certificate else None
        return transport.default().connect(address, self._token, pem, hostname=hostname)

    def _mend(self, k: int, error: TransportError) -> None:
        """Restart a shard that was killed and so could not be reached; give one that lives some time."""
        now, patience = time.monotonic(), 3 * PATIENCE
        if k < len(self._children):
            child = self._children[k]
            if is_stopped(child.process):
                child.process.kill()
                child.process.join()
            if not child.process.is_alive():
                self._revive(k)
                return
        else:
            patience = BY_HAND
            self.mind()
        first, last = self._unreached.get(k, (now, now))
        self._unreached[k] = first, now = (first if now - last < PATIENCE else now), now
        if now - first > patience:
            raise ParagradError(f"Shard {k + 1} cannot be reached: {error} Resume from the last checkpoint.") from None
        time.sleep(0.1)

    def _revive(self, k: int) -> None:
        """Start another process in the place of one that was killed; it continues from the memory that that one has left."""
        host, child = self._host, self._children[k]
        host.children.release(child)
        child.process.join()
        reason, clock = describe_exit(child.process), host.center.clock
        self._deaths[k] = 1 if clock > self._clocks[k] else self._deaths[k] + 1
        self._clocks[k] = clock
        log = host.session.directory / "logs" / f"shard-{k + 1}.log"
        if self._deaths[k] >= DEATHS:
            raise ParagradError(f"Shard {k + 1} {reason} {DEATHS} times without an update in between. Its log is {log}.")
        host.session.emit("warning", message=f"Shard {k + 1} {reason}; it is restarted.")
        self._children[k] = self._start(k, incarnation=child.incarnation + 1, before=self._peers[k].address)
        address = self._listens(k)
        self._unreached.pop(k, None)
        self._move(k, address)

    def _move(self, k: int, address: str) -> None:
        """Connect to where a shard listens now; the old connection may be to a process that is gone."""
        self._peers[k].channel.close()
        self._peers[k].address, self._peers[k].channel = address, self._connect(address)
        self._publish()

    def _publish(self) -> None:
        assert self._coordinator is not None
        places = zip(self._coordinator.slices, self._peers, strict=True)
        self._host.publish_shards([(lo, hi, peer.address) for (lo, hi), peer in places])
