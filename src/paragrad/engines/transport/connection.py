"""A worker's connection to a center: finds it, joins, sends heartbeats, and reconnects when the connection breaks."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from paragrad.codecs.codec import size
from paragrad.engines.process.mapped_file import boot
from paragrad.engines.process.segment import Layout, layout_from
from paragrad.engines.transport import transport
from paragrad.engines.transport.endpoint import FILE, TOKEN, Endpoint, read_token
from paragrad.engines.transport.message import PROTOCOL, Malformed, Refused, TransportError, Vectors
from paragrad.engines.transport.transport import Channel, Header
from paragrad.errors import ParagradError, UsageError

PATIENCE = 600.0
"""Seconds that a worker waits for a center that cannot be reached, before it gives up."""
DEADLINE = 60.0
"""Seconds for an exchange, plus two for each megabyte."""
BROKEN = TransportError, Refused, UsageError
"""Errors of a call if the center cannot be reached, or rejects it."""


class RunEnded(ParagradError):
    """The run is over; the message says why."""


class Replaced(Exception):
    """The center has given this worker up while it was disconnected: it joins again, for any rank."""


class Fenced(ParagradError):
    """The center took this worker for dead and started another one instead: this one ends."""


@dataclass(frozen=True)
class Placement:
    """The rank of a worker, and the properties of the center that it needs."""

    rank: int
    incarnation: int
    start_id: str
    """Identifies one start of the center."""
    run: str
    """The same for all starts of the center of one run."""
    workers: int
    window: int
    answers: bool
    """True if the center's memory has a row of replies for each worker."""
    beat: float
    """Seconds between two heartbeats."""
    file: str | None = None
    """The center's memory, if the worker is on its machine."""
    layout: Layout | None = None
    shards: Sequence[tuple[int, int, str]] = ()
    """First and last value, and address, of each shard that holds a slice of the center."""

    @property
    def sender(self) -> Header:
        """Header fields that identify the worker in every message."""
        return {"rank": self.rank, "incarnation": self.incarnation, "start_id": self.start_id}


class Connection:
    """One worker's connection. ``where``: a run directory, which is read again for every attempt, or an endpoint."""

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

    # -- joining and leaving --------------------------------------------------------------------------------

    def about(self) -> Header:
        """Ask what is trained. Waits for a center that cannot be reached."""
        until, reported = time.monotonic() + self._patience, False
        while True:
            try:
                return self._connected().ask("about", {"protocol": PROTOCOL})
            except TransportError as error:
                if time.monotonic() > until:
                    raise
                if not reported:
                    reported = True
                    self.say(f"{error} This worker waits for it.")
                time.sleep(0.5)
                self.disconnect()

    def announce_shard(self, index: int, address: str) -> str:
        """Announce where a shard is; return the identity of the center's start."""
        answer = self._connected().ask("shard", {"protocol": PROTOCOL, "index": index, "address": address})
        return str(answer["start_id"])

    def join(self, same: Mapping[str, Any]) -> Placement:
        """Join as a newcomer; ``same`` must equal what the center has. Waits if all ranks are taken."""
        with self._lock:
            self._same, self.placement, self._lost = dict(same), None, False
            placement = self._join()
        if self._heartbeats is None:
            self._heartbeats = threading.Thread(target=self._send_heartbeats, name="paragrad-heartbeat", daemon=True)
            self._heartbeats.start()
        return placement

    def leave(self, failure: str | None = None, *, usage: str | None = None, early: bool = False) -> None:
        """Leave: there are no rows left, or the worker failed, or (``early``) it leaves rows for others. ``failure``: the
        traceback. ``usage``: the error in one line, if it is a mistake of the user."""
        with contextlib.suppress(*BROKEN, RunEnded):
            # A worker that is interrupted does not wait for a connection that another thread is reconnecting.
            channel = self._channel if early else self._connected()
            if self.placement is not None and channel is not None:
                header: Header = {"protocol": PROTOCOL, **self.placement.sender}
                header |= {"early": True} if early else {}
                header |= {} if failure is None else {"failure": failure[-100_000:], "usage": usage}
                channel.ask("leave", header, timeout=5.0)
        self._closing.set()

    def warn(self, message: str) -> None:
        """Print a warning, and let the center record it."""
        self.say(message)
        with contextlib.suppress(*BROKEN, RunEnded):
            if self.placement is not None:
                self._connected().ask("warn", {"protocol": PROTOCOL, **self.placement.sender, "message": message}, timeout=5.0)

    def bring_residual(self, residual_after: Callable[[int], Vectors]) -> bool:
        """Bring the codec's residual of this worker, at the end of a run that may be resumed. Return False if the center does
        not have it."""
        with contextlib.suppress(*BROKEN, RunEnded):
            last: int = self._connected().ask("last", {"protocol": PROTOCOL, **self._sender()}, timeout=5.0)["last"]
            if last:
                self._bring(last, {}, residual_after(last))
            return True
        return False

    def bring_state(self, sequence: int, header: Mapping[str, Any], vectors: Vectors) -> None:
        """Bring private state after the last commit was applied, for a checkpoint, if the center can be reached."""
        with contextlib.suppress(*BROKEN, RunEnded):
            self._bring(sequence, header, vectors)

    def _bring(self, sequence: int, header: Mapping[str, Any], vectors: Vectors) -> None:
        header = {"op": "bring", "sequence": sequence, **header, **self._sender()}
        self._connected().exchange(header, vectors, lambda back: {}, timeout=deadline(vectors, 5.0))

    def close(self) -> None:
        """Close the connection, even with calls in flight."""
        self._closing.set()
        channel = self._channel
        if channel is not None:
            channel.close()

    def unshare(self) -> Placement:
        """Keep the rank, but send everything over the connection, because this process cannot map the center's memory."""
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
        """Make one exchange, and repeat it until it is answered; ``header`` and ``vectors`` are called for every attempt."""
        asked: Mapping[str, Any] = header()
        while True:
            sent = vectors() if asked.get("op") != "again" else {}
            try:
                self._check_membership()
                back = self._connected().exchange({**asked, **self._sender()}, sent, into, timeout=deadline(sent))
            except Malformed:
                raise
            except (TransportError, Refused):  # a center that rejects this worker may be another one at the same address
                self._reconnect()
                asked = header()
                continue
            if "stop" in back:
                raise RunEnded(back["stop"])
            if not back.get("pending"):
                return back
            assert self.placement is not None
            joining = asked["op"] == "begin"
            asked = {"op": "again", "sequence": -1 - self.placement.incarnation if joining else asked["sequence"]}

    def find_shards(self) -> Placement:
        """Ask the center for the present addresses of its shards. Waits for a center that cannot be reached."""
        self._check_membership()
        return self._reconnect()

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
            raise Fenced("The center took this worker for dead and started another one instead.")
        if self._lost:
            raise Replaced

    def _reconnect(self) -> Placement:
        with self._lock:
            return self._join(back=True)

    # -- heartbeats -----------------------------------------------------------------------------------------

    def _send_heartbeats(self) -> None:
        """Send heartbeats, also while the worker computes; reconnect if the connection breaks."""
        while not self._closing.is_set() and self._over is None and not self._fenced:
            placement = self.placement
            if placement is None or self._lost:  # until there is another one
                if self._closing.wait(0.1):
                    return
                continue
            pauses = chain([0.0], repeat(placement.beat))  # the first is sent at once, so that the center knows of this worker
            try:
                beat, heard = partial(self._beat, placement, pauses), partial(self._heard, placement)
                self._connected().heartbeat(placement.sender, beat, heard)
            except RunEnded as ended:
                self._over = str(ended)
            except BROKEN:
                if self._closing.wait(0.2 + 0.3 * random.random()):
                    return
                with contextlib.suppress(*BROKEN, RunEnded, Fenced), self._lock:
                    if self.placement is placement and not self._lost and self._try_join(back=True) is None:
                        self._lost = True

    def _beat(self, placement: Placement, pauses: Iterator[float]) -> Header | None:
        over = self._closing.wait(next(pauses)) or self._lost or self._fenced or self._over is not None
        return None if over or self.placement is not placement else {}

    def _heard(self, placement: Placement, answer: Header) -> None:
        self.neighbours = answer.get("neighbours", self.neighbours)
        if "stop" in answer:
            self._over = answer["stop"]
        elif answer.get("fenced"):
            self._fenced = True
        elif answer.get("gone") and self.placement is placement:  # a later placement is not affected
            self._lost = True

    # -- inside ---------------------------------------------------------------------------------------------

    def _join(self, *, back: bool = False) -> Placement:
        """Join, and wait as long as needed; ``back``: only for the rank that this worker had."""
        until, reported, pause = time.monotonic() + self._patience, False, 0.1
        while True:
            if self._closing.is_set() or self._over is not None:
                raise RunEnded(self._over or "closed")
            try:
                placement = self._try_join(back=back)
                if placement is None and back and self._number is None:
                    raise Replaced
                if placement is not None:
                    if reported:
                        self.say(f"Worker {placement.rank} is connected.")
                    return placement
                until = time.monotonic() + self._patience  # patience is for a center that cannot be reached
                message = "All ranks are taken; this worker waits for one."
            except (TransportError, Refused) as error:
                # Another center may listen at this address; a worker that had a rank waits for its own.
                if isinstance(error, Refused) and not back:
                    raise
                message = f"{error} This worker waits for it."
                if time.monotonic() > until:
                    raise TransportError(f"{error} This worker waited for {self._patience:.0f} seconds.") from None
            if not reported and pause > 0.5:
                reported = True
                self.say(message)
            if self._closing.wait(pause * (1 + random.random())):
                raise RunEnded("closed")
            pause = min(1.0, 2 * pause)
            self.disconnect()

    def _try_join(self, *, back: bool = False) -> Placement | None:
        """Ask once; return None if there is no rank for this worker now."""
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
        answer = self._connected().ask("join", header)
        if "stop" in answer:
            raise RunEnded(answer["stop"])
        if "fenced" in answer:
            self._fenced = True
            self._check_membership()
        if "full" in answer or "gone" in answer:
            return None
        layout = answer.pop("layout", None)
        self.placement = Placement(**answer, layout=None if layout is None else layout_from(layout))
        return self.placement

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
        token = self._token
        if token is None:
            assert isinstance(self._where, Path)
            token = read_token(self._where / TOKEN)
        return transport.default().connect(address, token, pem, hostname=endpoint.hostname)

    def _find(self) -> Endpoint:
        if isinstance(self._where, Endpoint):
            return self._where
        if not (self._where / FILE).exists():
            if (self._where / "summary.json").exists():
                raise RunEnded("finished")
            raise TransportError(f"There is no {FILE} in {self._where} yet: no center runs there.")
        return Endpoint.read(self._where)

    def disconnect(self) -> None:
        """Disconnect, so that the next attempt looks for the center again: it may have another address."""
        with self._lock:
            if self._channel is not None:
                channel, self._channel = self._channel, None
                with contextlib.suppress(Exception):
                    channel.close()


def deadline(vectors: Vectors, base: float = DEADLINE) -> float:
    """Return the seconds that an exchange of these vectors may take."""
    return base + 2 * size(vectors) / 1e6
