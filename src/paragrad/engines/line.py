"""A worker's line to a center elsewhere: finds it, takes a place, says that it is there, comes back when it broke."""

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
from typing import TYPE_CHECKING, Any

from paragrad.engines.memory import boot
from paragrad.engines.shared import Layout, layout_from
from paragrad.errors import ParagradError, UsageError
from paragrad.transport.endpoint import FILE, TOKEN, Endpoint, read_token
from paragrad.transport.message import PROTOCOL, Malformed, Refused, TransportError, Vectors

if TYPE_CHECKING:
    from paragrad.transport.flight import Client

PATIENCE = 600.0
"""Seconds that a worker waits for a center that is gone, before it gives up."""
DEADLINE = 60.0
"""Seconds for an exchange, besides a second for each megabyte."""


class Ended(ParagradError):
    """The run is over; the message says why."""


class Replaced(Exception):
    """The worker was given up while it was away: it begins again, on another place or as another on its own."""


@dataclass(frozen=True)
class Place:
    """Where a worker sits."""

    rank: int
    incarnation: int
    life: str
    """Of the center: another one when it was started again."""
    run: str
    """The same for all lives of the center of one run."""
    workers: int
    window: int
    answers: bool
    """Whether the center lays answers out for each worker, where it shares memory."""
    beat: float
    file: str | None = None
    """The center's memory, where the worker is on its machine."""
    layout: Layout | None = None
    shards: Sequence[tuple[int, int, str]] = ()
    """From where to where each goes that holds a slice of the center, and its address."""


class Line:
    """One worker's connection. ``where`` is a run directory, looked at again for every attempt, or an endpoint."""

    def __init__(
        self,
        where: Path | Endpoint,
        token: str | None = None,
        *,
        patience: float = PATIENCE,
        shared: bool = True,
        rank: int | None = None,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._where = where
        self._token = token
        self._patience = patience
        self._shared = shared
        self._rank = rank
        self.say = say
        self._key = os.urandom(12).hex()
        self._client: Client | None = None
        self._of: Endpoint | None = None
        self._same: dict[str, Any] = {}
        self.place: Place | None = None
        self._lock = threading.RLock()
        self.neighbours = 1
        """Workers of this center on this machine, this one included."""
        self._over: str | None = None
        self._lost = False
        self._closing = threading.Event()
        self._staying: threading.Thread | None = None
        self._new = True

    # -- finding the center ---------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """What is trained there."""
        return self._ask("about", {})

    def announce(self, index: int, address: str) -> str:
        """A shard says where it is; returns the life of the center."""
        told = self._ask_once("shard", {"protocol": PROTOCOL, "index": index, "address": address})
        return str(told["life"])

    def take_place(self, same: Mapping[str, Any]) -> Place:
        """Join as a newcomer; ``same`` is what must be the same as the center's. Waits where all places are taken."""
        with self._lock:
            self._same, self.place, self._lost = dict(same), None, False
            place = self._join()
        if self._staying is None:
            self._staying = threading.Thread(target=self._stay, name="paragrad-beat", daemon=True)
            self._staying.start()
        return place

    def leave(self, failure: str | None = None, *, early: bool = False) -> None:
        """All is done, or went wrong, for the reason given; or ``early``, with rows left for others: the place is free."""
        with contextlib.suppress(TransportError, Refused, Ended, UsageError):
            # Who is interrupted does not wait for a line that another thread is about to mend.
            client = self._client if early else self._the_client()
            if self.place is not None and client is not None:
                said: dict[str, Any] = {"early": True} if early else {}
                said |= {} if failure is None else {"failure": failure[-100_000:]}
                client.ask("leave", {"protocol": PROTOCOL, **self._me(), **said}, timeout=5.0)
        self._closing.set()

    def bring(self, left: Callable[[int], Vectors]) -> bool:
        """The run is over. Where it may go on later, the center takes along what a codec has ``left`` out of this worker's
        commits, up to the last that counts; False where that is still to be had here alone."""
        with contextlib.suppress(TransportError, Refused, Ended, UsageError):
            client, me = self._the_client(), self._me()
            last: int = client.ask("last", {"protocol": PROTOCOL, **me}, timeout=5.0)["last"]
            if not last:
                return True
            vectors = left(last)
            size = sum(vector.numel() * vector.element_size() for vector in vectors.values())
            client.exchange({"op": "bring", "sequence": last, **me}, vectors, lambda back: {}, timeout=5.0 + 2 * size / 1e6)
            return True
        return False

    def close(self) -> None:
        """Hang up, whatever is under way."""
        self._closing.set()
        client = self._client
        if client is not None:
            client.close()

    def unshare(self) -> Place:
        """The center's memory is out of reach from here: the same place, but all goes over the line."""
        with self._lock:
            self._shared = False
            place = self._try_join(back=True)
            if place is None:
                raise Replaced
            return place

    # -- exchanges ------------------------------------------------------------------------------------------

    def exchange(
        self,
        head: Callable[[], Mapping[str, Any]],
        vectors: Callable[[], Vectors],
        into: Callable[[dict[str, Any]], Vectors],
    ) -> dict[str, Any]:
        """One exchange, tried again until it is answered; what is sent is asked for anew each time."""
        asked: Mapping[str, Any] = head()
        while True:
            sent = vectors() if asked.get("op") != "again" else {}
            size = sum(vector.numel() * vector.element_size() for vector in sent.values())
            try:
                self._look()
                timeout = DEADLINE + 2 * size / 1e6
                back = self._the_client().exchange({**asked, **self._me()}, sent, into, timeout=timeout)
            except Malformed:
                raise
            except (TransportError, Refused):  # where it does not know us, it may be another center by now
                self._again()
                asked = head()
                continue
            if "stop" in back:
                raise Ended(back["stop"])
            if back.get("pending"):
                asked = {"op": "again", "sequence": _waits_for(asked, self.place)}
                continue
            return back

    def find_again(self) -> Place:
        """A shard did not answer: the center knows where it is by now. Waits for the center, where that is gone, too."""
        self._look()
        self._again()
        assert self.place is not None
        return self.place

    def client_of(self, address: str) -> Client:
        """Another server of the same run."""
        from paragrad.transport.flight import Client

        with self._lock:
            self._the_client()
            assert self._of is not None
            pem = None if self._of.certificate is None else self._of.certificate.encode()
            return Client(address, self._the_token(), pem, hostname=self._of.hostname)

    def _look(self) -> None:
        if self._over is not None:
            raise Ended(self._over)
        if self._lost:
            raise Replaced

    def _again(self) -> None:
        """The line broke, or the center was started again: find it, and the place there that was ours."""
        with self._lock:
            self._join(back=True)

    # -- presence -------------------------------------------------------------------------------------------

    def _stay(self) -> None:
        """Say every second that the worker is there, also while it computes; come back where the line breaks."""
        while not self._closing.is_set() and self._over is None:
            place = self.place
            if place is None or self._lost:  # until there is another place
                if self._closing.wait(0.1):
                    return
                continue
            try:
                self._new = True
                self._the_client().stay(_who(place), self._beat, self._heard)
            except Ended as ended:
                self._over = str(ended)
            except (TransportError, Refused, UsageError):
                if self._closing.wait(0.2 + 0.3 * random.random()):
                    return
                with contextlib.suppress(TransportError, Refused, Ended, UsageError), self._lock:
                    if self.place is place and not self._lost and self._try_join(back=True) is None:
                        self._lost = True

    def _beat(self) -> dict[str, Any] | None:
        place, pause = self.place, 0.0
        if not self._new:  # the first goes out at once: who is there shall be known
            pause = 1.0 if place is None else place.beat
        self._new = False
        if self._closing.wait(pause) or self._lost or self._over is not None:
            return None
        return {}

    def _heard(self, answer: dict[str, Any]) -> None:
        self.neighbours = answer.get("neighbours", self.neighbours)
        if "stop" in answer:
            self._over = answer["stop"]
        elif answer.get("gone"):
            self._lost = True

    # -- inside ---------------------------------------------------------------------------------------------

    def _join(self, *, back: bool = False) -> Place:
        """Take a place, whatever time it takes; ``back``: that which was ours, or none."""
        until, said, pause = time.monotonic() + self._patience, False, 0.1
        while True:
            if self._closing.is_set() or self._over is not None:
                raise Ended(self._over or "closed")
            try:
                place = self._try_join(back=back)
                if place is None and back:
                    raise Replaced
                if place is not None:
                    if said:
                        self.say(f"Worker {place.rank} is connected.")
                    return place
                until = time.monotonic() + self._patience  # the center is there, only its places are taken
                message = "All places are taken; this worker waits for one."
            except (TransportError, Refused) as error:
                # Where the center was, another may listen by now; who had a place waits for its own.
                if isinstance(error, Refused) and not back:
                    raise
                message = f"{error} This worker waits for it."
                if time.monotonic() > until:
                    raise TransportError(f"{error} It was waited for {self._patience:.0f} seconds.") from None
            if not said and pause > 0.5:
                said = True
                self.say(message)
            if self._closing.wait(pause * (1 + random.random())):
                raise Ended("closed")
            pause = min(1.0, 2 * pause)
            self.hang_up()

    def _try_join(self, *, back: bool = False) -> Place | None:
        before = self.place
        head = {
            "protocol": PROTOCOL,
            "key": self._key,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot": boot(),
            "uid": os.getuid(),
            "shared": self._shared,
            "rank": self._rank,
            "was": None if before is None else [before.rank, before.incarnation],
            "back": back,
            **self._same,
        }
        told = self._ask_once("join", head)
        if "stop" in told:
            raise Ended(told["stop"])
        if "full" in told or "gone" in told:
            return None
        layout = told.pop("layout", None)
        self.place = Place(**told, layout=None if layout is None else layout_from(layout))
        return self.place

    def _ask(self, name: str, head: Mapping[str, Any]) -> dict[str, Any]:
        until = time.monotonic() + self._patience
        said = False
        while True:
            try:
                return self._ask_once(name, {"protocol": PROTOCOL, **head})
            except TransportError as error:
                if time.monotonic() > until:
                    raise
                if not said:
                    said = True
                    self.say(f"{error} This worker waits for it.")
                time.sleep(0.5)
                self.hang_up()

    def _ask_once(self, name: str, head: Mapping[str, Any]) -> dict[str, Any]:
        return self._the_client().ask(name, head)

    def _me(self) -> dict[str, Any]:
        place = self.place
        assert place is not None
        return _who(place)

    def _the_client(self) -> Client:
        from paragrad.transport.flight import Client

        with self._lock:
            if self._client is None:
                self._of = self._find()
                token = self._the_token()
                pem = None if self._of.certificate is None else self._of.certificate.encode()
                self._client = Client(self._of.address, token, pem, hostname=self._of.hostname)
            return self._client

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
                raise Ended("finished")
            raise TransportError(f"There is no {FILE} in {self._where} yet: no center runs there.")
        return Endpoint.read(self._where)

    def hang_up(self) -> None:
        """The next attempt looks for the center anew: it may listen elsewhere by now."""
        with self._lock:
            if self._client is not None:
                client, self._client = self._client, None
                with contextlib.suppress(Exception):
                    client.close()


def _who(place: Place) -> dict[str, Any]:
    return {"rank": place.rank, "incarnation": place.incarnation, "life": place.life}


def _waits_for(asked: Mapping[str, Any], place: Place | None) -> int:
    if asked.get("op") == "begin":
        assert place is not None
        return -1 - place.incarnation
    sequence = asked["sequence"]
    if not isinstance(sequence, int):
        raise Malformed("An exchange has no sequence.")
    return sequence
