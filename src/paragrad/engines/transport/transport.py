"""What a transport is: how a service listens, and how others reach it. Arrow Flight is one; MPI can be another.

The center sleeps on descriptors. A service is called in threads of its transport and writes into the center's pipe, so a
transport without descriptors of its own needs no more than a thread that makes progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from paragrad.config.extras import command
from paragrad.engines.transport.message import Vectors
from paragrad.errors import UsageError

Header = dict[str, Any]
"""Plain JSON values by name."""


class Request(Protocol):
    """How a service answers one exchange."""

    def begin(self, header: Header) -> Vectors:
        """Return where to put the vectors that follow a header; raise ``Refused`` where they are not wanted."""

    def filling(self) -> AbstractContextManager[None]:
        """Guard every piece that is put there; raises where it is no longer wanted."""

    def finish(self, header: Header) -> tuple[Header, Vectors]:
        """Return the answer, once all vectors are there. May block."""


class Service(Protocol):
    """What listens: the center, or a shard of it. Its methods are called in threads of the transport."""

    def ask(self, name: str, header: Header, peer: str) -> Header:
        """Answer a short question."""

    def exchange(self, peer: str) -> Request:
        """Begin an exchange of vectors."""

    def heartbeat(self, header: Header, peer: str) -> Iterator[Header]:
        """Yield an answer to every heartbeat of a worker; closed when its connection ends."""

    def rejected(self, peer: str, why: str) -> None:
        """Count a client that was rejected."""


class Listener(Protocol):
    """A service that listens."""

    @property
    def port(self) -> int:
        """Its port."""

    def close(self, *, within: float = 5.0) -> None:
        """Close the port. A call whose client neither reads nor hangs up is waited for no longer than this."""


class Channel(Protocol):
    """A client's connection to a service. Raises ``TransportError`` where another attempt may succeed, else ``Refused``."""

    def ask(self, name: str, header: Mapping[str, Any], *, timeout: float = 10.0) -> Header:
        """Ask a short question."""

    def exchange(
        self,
        header: Mapping[str, Any],
        vectors: Vectors,
        into: Callable[[Header], Vectors],
        *,
        timeout: float,
    ) -> Header:
        """Send a header and vectors; return the header that comes back, its vectors read into what ``into`` returns."""

    def heartbeat(self, header: Mapping[str, Any], beat: Callable[[], Header | None], heard: Callable[[Header], None]) -> None:
        """Send every beat and pass on its answer; return when ``beat`` gives None, raise when the connection breaks."""

    def close(self) -> None:
        """Close the connection; whatever is under way in other threads ends."""


class Transport(Protocol):
    """How services listen and how they are reached."""

    def listen(self, service: Service, address: str, token: str, certificate: tuple[bytes, bytes] | None = None) -> Listener:
        """Listen at an address; raise ``TransportError`` where that is not possible."""

    def connect(self, address: str, token: str, certificate: bytes | None = None, *, hostname: str | None = None) -> Channel:
        """Prepare a connection; it is made when it is first used."""


def default() -> Transport:
    """Return the transport over Arrow Flight; raise where its library is missing."""
    try:
        from paragrad.engines.transport.flight import FlightTransport
    except ImportError:
        raise UsageError(f"Workers over a network need pyarrow, which is missing: {command('network')}") from None
    return FlightTransport()
