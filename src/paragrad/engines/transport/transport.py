"""The interface of a transport: how a service listens, and how clients reach it. Arrow Flight is one; MPI can be another.

The center waits on file descriptors. A service is called in threads of its transport and writes into the center's pipe. So a
transport without file descriptors needs only a thread that makes progress.
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
    """One exchange, on the side of the service."""

    def begin(self, header: Header) -> Vectors:
        """Return the memory for the vectors that follow a header; raise ``Refused`` if the service rejects them."""

    def filling(self) -> AbstractContextManager[None]:
        """Guard the writing of one piece into that memory; raise ``Refused`` if the exchange is obsolete."""

    def finish(self, header: Header) -> tuple[Header, Vectors]:
        """Return the answer, once all vectors have arrived. May block."""


class Service(Protocol):
    """The side that listens: the center, or a shard of it. Its methods are called in threads of the transport."""

    def ask(self, name: str, header: Header, peer: str) -> Header:
        """Answer a short question."""

    def exchange(self, peer: str) -> Request:
        """Begin an exchange of vectors."""

    def heartbeat(self, header: Header, peer: str) -> Iterator[Header]:
        """Yield an answer to every heartbeat of a worker; the generator is closed when the connection ends."""

    def rejected(self, peer: str, why: str) -> None:
        """Count a client that was rejected."""


class Listener(Protocol):
    """A service that listens."""

    @property
    def port(self) -> int:
        """The port that it listens at."""

    def close(self, *, within: float = 5.0) -> None:
        """Close the port. Wait at most this many seconds for a call whose client neither reads nor hangs up."""


class Channel(Protocol):
    """A client's connection to a service. Raises ``TransportError`` if another attempt may succeed, else ``Refused``."""

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
        """Send a header and vectors; return the header that comes back. Its vectors are read into what ``into`` returns."""

    def heartbeat(self, header: Mapping[str, Any], beat: Callable[[], Header | None], heard: Callable[[Header], None]) -> None:
        """Send every beat and pass its answer to ``heard``; return when ``beat`` gives None, raise if the connection breaks."""

    def close(self) -> None:
        """Close the connection; calls in flight in other threads end."""


class Transport(Protocol):
    """Lets services listen, and clients connect to them."""

    def listen(self, service: Service, address: str, token: str, certificate: tuple[bytes, bytes] | None = None) -> Listener:
        """Listen at an address; raise ``TransportError`` if that is not possible."""

    def connect(self, address: str, token: str, certificate: bytes | None = None, *, hostname: str | None = None) -> Channel:
        """Prepare a connection, which is made when it is first used."""


def default() -> Transport:
    """Return the transport over Arrow Flight; raise ``UsageError`` if its library is missing."""
    try:
        from paragrad.engines.transport.flight import FlightTransport
    except ImportError:
        raise UsageError(f"Workers over a network need pyarrow, which is missing: {command('network')}") from None
    return FlightTransport()
