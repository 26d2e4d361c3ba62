"""The processes that a center is spread over, besides its own: started here, filled, and started again where one is killed."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from paragrad.center import Center
from paragrad.engines import processes
from paragrad.engines.children import Child
from paragrad.engines.elsewhere import Shards, cuts
from paragrad.engines.line import DEADLINE
from paragrad.engines.shard import ShardPost
from paragrad.engines.shared import Segment
from paragrad.errors import ParagradError
from paragrad.job import Job
from paragrad.state import TwoBuffers
from paragrad.transport import endpoint
from paragrad.transport.message import PROTOCOL, Refused, TransportError, Vectors

if TYPE_CHECKING:
    from paragrad.engines.networkcrew import NetworkCrew
    from paragrad.engines.reception import Reception
    from paragrad.transport.flight import Client

DEATHS = 3
"""Deaths of one shard without an update in between that end the run."""
BY_HAND = 600.0
"""Seconds in which a shard that was started by hand, and is gone, may be started again."""
PATIENCE = 60.0
"""Seconds that a shard may take to listen, or not be reached while its process lives."""


class _Peer:
    """A shard's address, and the connection to it."""

    def __init__(self, connect: Callable[[str], Client], address: str) -> None:
        self.address = address
        self.client = connect(address)

    def ask(self, name: str, head: Mapping[str, Any]) -> dict[str, Any]:
        """One question."""
        return self.client.ask(name, head, timeout=DEADLINE)

    def exchange(self, head: Mapping[str, Any], vectors: Vectors, into: Callable[[dict[str, Any]], Vectors]) -> dict[str, Any]:
        """A head and vectors there, and back."""
        size = sum(vector.numel() * vector.element_size() for vector in vectors.values())
        return self.client.exchange(head, vectors, into, timeout=2 * DEADLINE + 2 * size / 1e6)


class Company:
    """All shards but the first, which is the center's own process. Number k of them is shard k + 1."""

    def __init__(self, crew: NetworkCrew, job: Job, shards: int, weights: torch.Tensor) -> None:
        self._crew = crew
        self._shards = shards
        self._weights = weights
        self._cuts = cuts(weights.numel(), shards, job.codec)
        self.first = self._cuts[1]
        """Where the center's own slice ends."""
        self.life = os.urandom(8).hex()
        self._elsewhere: Shards | None = None
        self._children: list[Child] = []
        self._peers: list[_Peer] = []
        self._deaths = [0] * (shards - 1)
        self._clocks = [0] * (shards - 1)
        self._unreached: dict[int, tuple[float, float]] = {}
        """Since when, and when last, a shard that lives could not be reached."""
        self._whole: TwoBuffers | None = None
        self.shown = Segment()
        """The whole center, as it was when it was last to be looked at."""

    # -- life -----------------------------------------------------------------------------------------------

    def attach(self, center: Center) -> None:
        """The center is there, and about to be brought to where a resumed run left off."""
        center.elsewhere = self._elsewhere = Shards(center, self._weights, self._cuts, self.life)

    def expect(self, reception: Reception, pair: tuple[bytes, bytes] | None) -> None:
        """Nobody may work before they are there."""
        engine = self._crew.engine
        reception.life, reception.closed = self.life, True
        reception.announced = dict.fromkeys(range(self._shards - engine.shards_elsewhere, self._shards))
        host, _ = endpoint.split_address(engine.address)
        self._host, self._name = host, engine.advertise or endpoint.advertised(host)
        self._pair = pair

    def begin(self, token: str) -> bool:
        """Start the processes, which listen where the center does, and fill them; wait for those that are started by hand.
        False where a stop was asked for meanwhile."""
        assert self._elsewhere is not None
        self._token = token
        own = self._shards - 1 - self._crew.engine.shards_elsewhere
        for k in range(own):
            self._children.append(self._launch(k))
        addresses = [self._listens(k) for k in range(own)]
        for k in range(own, self._shards - 1):
            address = self._wait_for(k)
            if address is None:
                return False
            addresses.append(address)
        self._peers = [_Peer(self._connect, address) for address in addresses]
        self._tell_workers()
        self._elsewhere.begin(self._peers, self._mend)
        return True

    def _wait_for(self, k: int) -> str | None:
        session, announced, told = self._crew.session, self._crew.reception.announced, False
        while (address := announced[k + 1]) is None and session.stopped is None:
            if not told:
                told = True
                session.emit("note", message=f"Waits for: paragrad shard {session.directory} --index {k + 1}")
            time.sleep(0.1)
        return address

    def end(self, *, at_once: bool) -> None:
        """The center takes back what lies with the shards, and they may go; not where all end ``at_once``."""
        assert self._elsewhere is not None
        failure = ParagradError("The shards were ended before they had given back what they hold.") if at_once else None
        if not at_once:
            try:
                self._take_back()
            except ParagradError as error:
                failure = error
        self._elsewhere.close(failure)
        self.shown.close()

    def _take_back(self) -> None:
        self._crew.center.reunite()
        for k in range(len(self._children), len(self._peers)):
            with contextlib.suppress(TransportError, Refused):
                self._peers[k].ask("end", {"protocol": PROTOCOL, "life": self.life})

    @property
    def children(self) -> list[Child]:
        """Their processes."""
        return self._children

    @property
    def known(self) -> dict[str, Any]:
        """What the center's memory says of them."""
        return {"life": self.life, "count": self._shards}

    def child(self, rank: int) -> Child:
        """The process of that number among all of the crew's."""
        return self._children[rank - self._crew.engine.workers - 2]

    # -- what the validating process sees -------------------------------------------------------------------

    def show(self) -> None:
        """Gather the center as it is now for the process that validates."""
        center = self._crew.center
        value, state = center.whole(), center.state
        if self._whole is None:
            self._whole = TwoBuffers(
                value, state.buffers, state.integers, slots=(), workers=0, aliased=False, allocate=self.shown.allocate
            )
        _, spare = self._whole.begin()
        spare.value.copy_(value)
        spare.buffers.copy_(state.buffers)
        spare.integers.copy_(state.integers)
        self._whole.now.clock = center.clock - 1
        self._whole.flip([])

    # -- processes ------------------------------------------------------------------------------------------

    def mind(self) -> None:
        """One that was started by hand may have been started again, and listen elsewhere."""
        for k in range(len(self._children), len(self._peers)):
            address = self._crew.reception.announced[k + 1]
            if address is not None and address != self._peers[k].address:
                self._move(k, address)

    def on_death(self, rank: int) -> None:
        """One has ended while nothing was asked of it."""
        self._revive(rank - self._crew.engine.workers - 2)

    def _launch(self, k: int, *, incarnation: int = 0, before: str | None = None) -> Child:
        rank = self._crew.engine.workers + 2 + k
        ports = (0,) if before is None else (endpoint.split_address(before)[1], 0)
        child = self._crew._start(
            rank,
            incarnation=incarnation,
            role="shard",
            kind=ShardPost,
            name=f"shard-{k + 1}",
            index=k + 1,
            life=self.life,
            addresses=tuple(endpoint.address_of(self._host, port) for port in ports),
            pair=self._pair,
        )
        self._crew.session.emit("shard", index=k + 1, pid=child.process.pid, incarnation=incarnation)
        return child

    def _listens(self, k: int) -> str:
        """The address at which a shard that was started has begun to listen."""
        child, until = self._children[k], time.monotonic() + PATIENCE
        ready = select.poll()
        ready.register(child.notes.fd, select.POLLIN)
        while time.monotonic() < until and not child.notes.ended:
            ready.poll(500)
            for message in child.notes.read():
                if "listening" in message:
                    return endpoint.address_of(self._name, message["listening"])
                if "error" in message:
                    raise ParagradError(f"Shard {k + 1} could not begin.\n\n{message['error'].rstrip()}")
        raise TransportError(f"Shard {k + 1} has not begun to listen.")

    def _connect(self, address: str) -> Client:
        from paragrad.transport.flight import Client

        own = self._crew.engine.certificate is not None
        pem = None if self._pair is None else self._pair[0]
        return Client(address, self._token, pem, hostname=self._name if own else None)

    def _mend(self, k: int, error: TransportError) -> None:
        """A shard could not be reached: start it again if it was killed, else give it some time."""
        now, patience = time.monotonic(), 3 * PATIENCE
        if k < len(self._children):
            process = self._children[k].process
            if process.pid is not None and processes.is_stopped(process.pid):
                processes.kill(process)
            if not process.is_alive():
                self._revive(k)
                return
        else:
            patience = BY_HAND
            self.mind()
        first, last = self._unreached.get(k, (now, now))
        self._unreached[k] = first, now = (first if now - last < PATIENCE else now), now
        if now - first > patience:
            raise ParagradError(f"Shard {k + 1} cannot be reached: {error} Go on from the last checkpoint.") from None
        time.sleep(0.1)

    def _revive(self, k: int) -> None:
        """Another process in the place of one that was killed; it goes on from the memory that that one has left."""
        crew, member = self._crew, self._children[k]
        if member.process.is_alive():
            return  # another has taken its place already
        crew._watch.drop(member.process.sentinel)
        crew._watch.drop(member.notes.fd)
        member.process.join()
        reason = processes.describe_exit(member.process.exitcode)
        member.notes.close()
        clock = crew.center.clock
        self._deaths[k] = 1 if clock > self._clocks[k] else self._deaths[k] + 1
        self._clocks[k] = clock
        log = crew.session.directory / "logs" / f"shard-{k + 1}.log"
        if self._deaths[k] >= DEATHS:
            raise ParagradError(f"Shard {k + 1} {reason} {DEATHS} times without an update in between. Its log is {log}.")
        crew.session.emit("warning", message=f"Shard {k + 1} {reason}; it is started again.")
        self._children[k] = self._launch(k, incarnation=member.incarnation + 1, before=self._peers[k].address)
        address = self._listens(k)
        self._unreached.pop(k, None)
        self._move(k, address)

    def _move(self, k: int, address: str) -> None:
        """A shard listens there now; the old connection, if it is the same place, is to a process that is gone."""
        self._peers[k].client.close()
        self._peers[k].address, self._peers[k].client = address, self._connect(address)
        self._tell_workers()
        self._crew.say_where()

    def _tell_workers(self) -> None:
        assert self._elsewhere is not None
        places = zip(self._elsewhere.slices, self._peers, strict=True)
        self._crew.reception.shards = [(lo, hi, peer.address) for (lo, hi), peer in places]
