"""A worker's connection to a center: finds it, joins, sends heartbeats, reconnects when it breaks."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragrad.engines.process.mapped_file import boot
from paragrad.engines.process.segment import Layout, layout_from
from paragrad.engines.transport import transport
from paragrad.engines.transport.endpoint import FILE, TOKEN, Endpoint, read_token
from paragrad.engines.transport.message import PROTOCOL, Malformed, Refused, TransportError, Vectors, weight
from paragrad.engines.transport.transport import Channel, Header
from paragrad.errors import ParagradError, UsageError

PATIENCE = 600.0
"""Seconds that a worker waits for a center that cannot be reached, before it gives up."""
DEADLINE = 60.0
"""Seconds for an exchange, besides a second for each megabyte."""
BROKEN = TransportError, Refused, UsageError
"""What a call raises where the center cannot be reached, or does not want it."""


class RunEnded(ParagradError):
    """The run is over; the message says why."""


class Replaced(Exception):
    """The worker was given up while it was away: it begins again, for another rank or as another one for its own."""


class Fenced(ParagradError):
    """The center took this worker for dead and started another one in its place: this one ends."""


@dataclass(frozen=True)
class Placement:
    """The rank that a worker works for, and what it needs to know of the center."""

    rank: int
    incarnation: int
    start_id: str
    """Identifies one start of the center."""
    run: str
    """The same for all starts of the center of one run."""
    workers: int
    window: int
    answers: bool
    """Whether the center has a row of replies for each worker, where it shares memory."""
    beat: float
    file: str | None = None
    """The center's memory, where the worker is on its machine."""
    layout: Layout | None = None
    shards: Sequence[tuple[int, int, str]] = ()
    """First and last value, and address, of each shard that holds a slice of the center."""

    @property
    def sender(self) -> Header:
        """What a worker sends with every message, so that the center knows whose it is."""
        return {"rank": self.rank, "incarnation": self.incarnation, "start_id": self.start_id}


class Connection:
    """One worker's connection. ``where`` is a run directory, read again for every attempt, or an endpoint."""

    def __init__(
        self,
        where: Path | Endpoint,
        token: str | None = None,
        *,
        patience: float = PATIENCE,
        shared: bool = True,
        number: tuple[int, int] | None = None,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        """``number``: rank and incarnation of a worker that the center has started."""
        self._where = where
        self._token = token
        self._patience = patience
        self._shared = shared
        self._number = number
        self.say = say
        self._key = os.urandom(12).hex()
        self._channel: Channel | None = None
        self._endpoint: Endpoint | None = None
        self._same: dict[str, Any] = {}
        self.placement: Placement | None = None
        self._lock = threading.RLock()
        self.neighbours = 1
        """Workers of this center on this machine, this one included."""
        self._over: str | None = None
        self._lost = False
        self._fenced = False
        self._closing = threading.Event()
        self._heartbeats: threading.Thread | None = None
        self._first_beat = True

    # -- joining and leaving --------------------------------------------------------------------------------

    def about(self) -> Header:
        """Ask what is trained."""
        return self._ask("about", {})

    def announce_shard(self, index: int, address: str) -> str:
        """Announce where a shard is; return the identity of the center's start."""
        told = self._ask_once("shard", {"protocol": PROTOCOL, "index": index, "address": address})
        return str(told["start_id"])

    def join(self, same: Mapping[str, Any]) -> Placement:
        """Join as a newcomer; ``same`` must equal what the center has. Waits where all ranks are taken."""
        with self._lock:
            self._same, self.placement, self._lost = dict(same), None, False
            placement = self._join()
        if self._heartbeats is None:
            self._heartbeats = threading.Thread(target=self._send_heartbeats, name="paragrad-heartbeat", daemon=True)
            self._heartbeats.start()
        return placement

    def leave(self, failure: str | None = None, *, usage: str | None = None, early: bool = False) -> None:
        """Leave: all is done, or it failed for the reason given, or (``early``) rows are left for others. ``usage``:
        the failure is a mistake of the user, in one line."""
        with contextlib.suppress(*BROKEN, RunEnded):
            # A worker that is interrupted does not wait for a connection that another thread is about to mend.
            channel = self._channel if early else self._connected()
            if self.placement is not None and channel is not None:
                said: Header = {"early": True} if early else {}
                said |= {} if failure is None else {"failure": failure[-100_000:], "usage": usage}
                channel.ask("leave", {"protocol": PROTOCOL, **self.placement.sender, **said}, timeout=5.0)
        self._closing.set()

    def warn(self, message: str) -> None:
        """Let the center record a warning; it is shown here, too."""
        self.say(message)
        with contextlib.suppress(*BROKEN, RunEnded):
            if self.placement is not None:
                self._connected().ask("warn", {"protocol": PROTOCOL, **self.placement.sender, "message": message}, timeout=5.0)

    def bring_residual(self, residual_after: Callable[[int], Vectors]) -> bool:
        """Bring what a codec has left out of this worker's commits, once a run is over that may be resumed. Return False where
        it is still only here."""
        with contextlib.suppress(*BROKEN, RunEnded):
            channel, sender = self._connected(), self._sender()
            last: int = channel.ask("last", {"protocol": PROTOCOL, **sender}, timeout=5.0)["last"]
            if last:
                vectors = residual_after(last)
                header = {"op": "bring", "sequence": last, **sender}
                channel.exchange(header, vectors, lambda back: {}, timeout=5.0 + 2 * weight(vectors) / 1e6)
            return True
        return False

    def bring_state(self, sequence: int, header: Mapping[str, Any], vectors: Vectors) -> None:
        """Bring private state after the last commit was applied, for a checkpoint, if the center can be reached."""
        with contextlib.suppress(*BROKEN, RunEnded):
            said = {"op": "bring", "sequence": sequence, **header, **self._sender()}
            self._connected().exchange(said, vectors, lambda back: {}, timeout=5.0 + 2 * weight(vectors) / 1e6)

    def close(self) -> None:
        """Close the connection, whatever is under way."""
        self._closing.set()
        channel = self._channel
        if channel is not None:
            channel.close()

    def unshare(self) -> Placement:
        """Keep the rank, but send everything over the connection: the center's memory cannot be reached from here."""
        with self._lock:
            self._shared = False
            placement = self._try_join(back=True)
            if placement is None:
                raise Replaced
            return placement

    # -- exchanges ------------------------------------------------------------------------------------------

    def exchange(
        self,
        header: Callable[[], Mapping[str, Any]],
        vectors: Callable[[], Vectors],
        into: Callable[[Header], Vectors],
    ) -> Header:
        """Make one exchange, and try again until it is answered; what is sent is asked for anew each time."""
        asked: Mapping[str, Any] = header()
        while True:
            sent = vectors() if asked.get("op") != "again" else {}
            try:
                self._check_membership()
                timeout = DEADLINE + 2 * weight(sent) / 1e6
                back = self._connected().exchange({**asked, **self._sender()}, sent, into, timeout=timeout)
            except Malformed:
                raise
            except (TransportError, Refused):  # where it does not know this worker, it may be another center by now
                self._reconnect()
                asked = header()
                continue
            if "stop" in back:
                raise RunEnded(back["stop"])
            if back.get("pending"):
                asked = {"op": "again", "sequence": _waits_for(asked, self.placement)}
                continue
            return back

    def find_again(self) -> Placement:
        """Ask the center where its shards are by now: one did not answer. Waits for a center that cannot be reached."""
        self._check_membership()
        self._reconnect()
        assert self.placement is not None
        return self.placement

    def channel_to(self, address: str) -> Channel:
        """Connect to another server of the same run."""
        with self._lock:
            self._connected()
            assert self._endpoint is not None
            return self._connect(address, self._endpoint)

    def _check_membership(self) -> None:
        if self._over is not None:
            raise RunEnded(self._over)
        if self._fenced:
            raise Fenced("The center took this worker for dead and started another one in its place.")
        if self._lost:
            raise Replaced

    def _reconnect(self) -> None:
        """Find the center, and this worker's rank there: the connection broke, or the center was restarted."""
        with self._lock:
            self._join(back=True)

    # -- heartbeats -----------------------------------------------------------------------------------------

    def _send_heartbeats(self) -> None:
        """Send a heartbeat every second, also while the worker computes; reconnect where the connection breaks."""
        while not self._closing.is_set() and self._over is None and not self._fenced:
            placement = self.placement
            if placement is None or self._lost:  # until there is another one
                if self._closing.wait(0.1):
                    return
                continue
            try:
                self._first_beat = True
                self._connected().heartbeat(placement.sender, self._beat, self._heard)
            except RunEnded as ended:
                self._over = str(ended)
            except BROKEN:
                if self._closing.wait(0.2 + 0.3 * random.random()):
                    return
                with contextlib.suppress(*BROKEN, RunEnded, Fenced), self._lock:
                    if self.placement is placement and not self._lost and self._try_join(back=True) is None:
                        self._lost = True

    def _beat(self) -> Header | None:
        placement, pause = self.placement, 0.0
        if not self._first_beat:  # the first is sent at once: the center shall know of this worker
            pause = 1.0 if placement is None else placement.beat
        self._first_beat = False
        if self._closing.wait(pause) or self._lost or self._fenced or self._over is not None:
            return None
        return {}

    def _heard(self, answer: Header) -> None:
        self.neighbours = answer.get("neighbours", self.neighbours)
        if "stop" in answer:
            self._over = answer["stop"]
        elif answer.get("fenced"):
            self._fenced = True
        elif answer.get("gone"):
            self._lost = True

    # -- inside ---------------------------------------------------------------------------------------------

    def _join(self, *, back: bool = False) -> Placement:
        """Join, whatever time it takes; ``back``: only for the rank that this worker had."""
        until, said, pause = time.monotonic() + self._patience, False, 0.1
        while True:
            if self._closing.is_set() or self._over is not None:
                raise RunEnded(self._over or "closed")
            try:
                placement = self._try_join(back=back)
                if placement is None and back and self._number is None:
                    raise Replaced
                if placement is not None:
                    if said:
                        self.say(f"Worker {placement.rank} is connected.")
                    return placement
                until = time.monotonic() + self._patience  # the center is there, only its ranks are taken
                message = "All ranks are taken; this worker waits for one."
            except (TransportError, Refused) as error:
                # At the center's address another one may listen by now; a worker that had a rank waits for its own center.
                if isinstance(error, Refused) and not back:
                    raise
                message = f"{error} This worker waits for it."
                if time.monotonic() > until:
                    raise TransportError(f"{error} This worker waited for {self._patience:.0f} seconds.") from None
            if not said and pause > 0.5:
                said = True
                self.say(message)
            if self._closing.wait(pause * (1 + random.random())):
                raise RunEnded("closed")
            pause = min(1.0, 2 * pause)
            self.disconnect()

    def _try_join(self, *, back: bool = False) -> Placement | None:
        """Ask once; return None where there is no rank for this worker now."""
        before = self.placement
        header = {
            "protocol": PROTOCOL,
            "key": self._key,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot": boot(),
            "uid": os.getuid(),
            "shared": self._shared,
            "number": self._number,
            "was": None if before is None else [before.rank, before.incarnation],
            "back": back,
            **self._same,
        }
        told = self._ask_once("join", header)
        if "stop" in told:
            raise RunEnded(told["stop"])
        if "fenced" in told:
            self._fenced = True
            self._check_membership()
        if "full" in told or "gone" in told:
            return None
        layout = told.pop("layout", None)
        self.placement = Placement(**told, layout=None if layout is None else layout_from(layout))
        return self.placement

    def _ask(self, name: str, header: Mapping[str, Any]) -> Header:
        until = time.monotonic() + self._patience
        said = False
        while True:
            try:
                return self._ask_once(name, {"protocol": PROTOCOL, **header})
            except TransportError as error:
                if time.monotonic() > until:
                    raise
                if not said:
                    said = True
                    self.say(f"{error} This worker waits for it.")
                time.sleep(0.5)
                self.disconnect()

    def _ask_once(self, name: str, header: Mapping[str, Any]) -> Header:
        return self._connected().ask(name, header)

    def _sender(self) -> Header:
        assert self.placement is not None
        return self.placement.sender

    def _connected(self) -> Channel:
        with self._lock:
            if self._channel is None:
                self._endpoint = self._find()
                self._channel = self._connect(self._endpoint.address, self._endpoint)
            return self._channel

    def _connect(self, address: str, endpoint: Endpoint) -> Channel:
        pem = None if endpoint.certificate is None else endpoint.certificate.encode()
        return transport.default().connect(address, self._the_token(), pem, hostname=endpoint.hostname)

    def _the_token(self) -> str:
        if self._token is not None:
            return self._token
        assert isinstance(self._where, Path)
        return read_token(self._where / TOKEN)

    def _find(self) -> Endpoint:
        if isinstance(self._where, Endpoint):
            return self._where
        if not (self._where / FILE).exists():
            if (self._where / "summary.json").exists():
                raise RunEnded("finished")
            raise TransportError(f"There is no {FILE} in {self._where} yet: no center runs there.")
        return Endpoint.read(self._where)

    def disconnect(self) -> None:
        """Let the next attempt find the center anew: it may listen elsewhere by now."""
        with self._lock:
            if self._channel is not None:
                channel, self._channel = self._channel, None
                with contextlib.suppress(Exception):
                    channel.close()


def _waits_for(asked: Mapping[str, Any], placement: Placement | None) -> int:
    if asked.get("op") == "begin":
        assert placement is not None
        return -1 - placement.incarnation
    sequence = asked["sequence"]
    if not isinstance(sequence, int):
        raise Malformed("An exchange has no sequence.")
    return sequence
