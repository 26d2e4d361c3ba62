"""The transport over Arrow Flight, which no other file uses. An exchange sends a header and vectors, and receives the same."""

from __future__ import annotations

import contextlib
import hmac
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC reads it when loaded, and else prints errors that are raised as well

import pyarrow.flight as fl

from paragrad.engines.transport.endpoint import HOSTNAME
from paragrad.engines.transport.message import (
    CHUNK,
    Malformed,
    Refused,
    TransportError,
    Vectors,
    declare,
    decode,
    encode,
    expect,
    raw,
)
from paragrad.engines.transport.transport import Header, Service
from paragrad.errors import UsageError

SCHEMA = pa.schema([("bytes", pa.uint8())])
MALFORMED, REFUSED = "malformed: ", "refused: "


class FlightTransport:
    """gRPC, with a token in every call."""

    def listen(
        self, service: Service, address: str, token: str, certificate: tuple[bytes, bytes] | None = None
    ) -> FlightServer:
        """Listen; raise ``TransportError`` if the address is in use, or not of this machine."""
        try:
            return FlightServer(service, address, token, certificate)
        except (fl.FlightError, pa.ArrowException, OSError) as error:
            raise TransportError(f"Cannot listen at {address}: {_first_line(str(error))}.") from None

    def connect(
        self, address: str, token: str, certificate: bytes | None = None, *, hostname: str | None = None
    ) -> FlightChannel:
        """Prepare a connection."""
        return FlightChannel(address, token, certificate, hostname=hostname)


class FlightServer(fl.FlightServerBase):  # type: ignore[misc]
    """Listens, checks the token, and passes calls on to a service, each in its own thread."""

    def __init__(self, service: Service, address: str, token: str, certificate: tuple[bytes, bytes] | None = None) -> None:
        self._service = service
        self._tokens = _Tokens(token, service)
        scheme = "grpc+tls" if certificate else "grpc"
        super().__init__(
            f"{scheme}://{address}",
            tls_certificates=[certificate] if certificate else None,
            middleware={"token": self._tokens},
        )

    def close(self, *, within: float = 5.0) -> None:
        """Close the port, and drop the service: Flight keeps the server itself until the process ends."""
        closing = threading.Thread(target=self.shutdown, name="flight-shutdown", daemon=True)
        closing.start()
        closing.join(within)
        self._service = self._tokens.service = _Closed()

    def do_action(self, context: Any, action: Any) -> list[Any]:
        with _sends_errors(context, self._service):
            answer = self._service.ask(action.type, decode(action.body), context.peer())
            return [fl.Result(encode(answer))]

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with _sends_errors(context, self._service):
            header = decode(descriptor.command)
            if "heartbeat" in header:
                self._heartbeat(context, header, reader, writer)
                return
            request = self._service.exchange(context.peer())
            into = request.begin(header)
            expect(header, into)
            _read(reader, into, request.filling)
            with contextlib.suppress(StopIteration):
                while reader.read_chunk().data is None:
                    continue
                raise Malformed("More bytes came than were declared.")
            back, vectors = request.finish(header)
            writer.begin(SCHEMA)
            writer.write_metadata(encode({**back, "vectors": declare(vectors)}))
            _write_vectors(writer, vectors)

    def _heartbeat(self, context: Any, header: Header, reader: Any, writer: Any) -> None:
        """Answer the worker's heartbeats until it hangs up."""
        answers = self._service.heartbeat(header, context.peer())
        with contextlib.closing(answers), contextlib.suppress(StopIteration):  # type: ignore[type-var]
            while True:
                reader.read_chunk()
                writer.write_metadata(encode(next(answers)))


class _Closed:
    """The service of a server that was closed."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise Refused("gone: the center does not listen here any more.")

    ask = exchange = heartbeat = _refuse

    def rejected(self, peer: str, why: str) -> None:
        """Ignore it."""


class _Tokens(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    def __init__(self, token: str, service: Service) -> None:
        super().__init__()
        self._wanted = f"Bearer {token}".encode()
        self.service = service

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        given = next((value for key, values in headers.items() if key.lower() == "authorization" for value in values), "")
        if not hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._wanted):
            why = "a wrong token" if given else "no token"
            self.service.rejected("", why)
            raise fl.FlightUnauthenticatedError(f"This call has {why}.")


@contextlib.contextmanager
def _sends_errors(context: Any, service: Service) -> Iterator[None]:
    """Send the reason of a rejection to the client, and report it to the service."""
    try:
        yield
    except Malformed as error:
        service.rejected(context.peer(), str(error))
        raise fl.FlightServerError(MALFORMED + str(error)) from None
    except Refused as error:
        raise fl.FlightServerError(REFUSED + str(error)) from None
    except (fl.FlightError, pa.ArrowException, OSError):  # the connection
        raise
    except Exception as error:
        # Without MALFORMED the client would repeat a call that fails every time.
        traceback.print_exc()
        why = f"{type(error).__name__} while it was answered: {error}"
        service.rejected(context.peer(), why)
        raise fl.FlightServerError(f"{MALFORMED}The other side failed, with {why}. Its log says where.") from None


def _write_vectors(writer: Any, vectors: Vectors) -> None:
    for vector in vectors.values():
        data = raw(vector)
        for start in range(0, data.nbytes, CHUNK):
            piece = data[start : start + CHUNK]
            column = pa.Array.from_buffers(pa.uint8(), piece.nbytes, [None, pa.py_buffer(piece)])
            writer.write_batch(pa.RecordBatch.from_arrays([column], schema=SCHEMA))


def _read(reader: Any, into: Vectors, filling: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Read exactly the bytes of these vectors, in order; each piece is written under ``filling``."""
    for name, vector in into.items():
        room = raw(vector)
        start = 0
        while start < room.nbytes:
            try:
                chunk = reader.read_chunk().data
            except StopIteration:
                raise Malformed(f"{name!r} ended after {start:,} of {room.nbytes:,} bytes.") from None
            if chunk is None:
                continue
            if chunk.schema != SCHEMA:
                raise Malformed(f"A piece for {name!r} is not a column of bytes.")
            piece = np.frombuffer(chunk.column(0).buffers()[1], dtype=np.uint8, count=chunk.num_rows)
            if piece.nbytes > min(CHUNK, room.nbytes - start):
                raise Malformed(f"A piece for {name!r} has {piece.nbytes:,} bytes, which is longer than was declared.")
            with filling():
                room[start : start + piece.nbytes] = piece
            start += piece.nbytes


class FlightChannel:
    """A client's connection."""

    def __init__(self, address: str, token: str, certificate: bytes | None = None, *, hostname: str | None = None) -> None:
        self.address = address
        if certificate is not None and b"BEGIN CERTIFICATE" not in certificate:
            raise UsageError(f"The certificate for the center at {address} is not a certificate: a PEM file is needed.")
        self._encrypts = certificate is not None
        scheme = "grpc+tls" if certificate else "grpc"
        options = [
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.http2.lookahead_bytes", 16 * CHUNK),  # measured: larger reads of answers, 10 % faster on loopback
            ("grpc.http2.max_frame_size", CHUNK),
        ]
        own = {"tls_root_certs": certificate, "override_hostname": hostname or HOSTNAME} if certificate else {}
        self._client = fl.connect(f"{scheme}://{address}", generic_options=options, **own)
        self._headers = [(b"authorization", f"Bearer {token}".encode())]
        self._in_flight: set[Any] = set()
        self._closed = False

    def ask(self, name: str, header: Mapping[str, Any], *, timeout: float = 10.0) -> Header:
        """Ask a short question."""
        with _translated(self.address, self._encrypts):
            results = self._client.do_action(fl.Action(name, encode(header)), self._options(timeout))
            return decode(next(iter(results)).body)

    def exchange(
        self,
        header: Mapping[str, Any],
        vectors: Vectors,
        into: Callable[[Header], Vectors],
        *,
        timeout: float,
    ) -> Header:
        """Send a header and vectors; return the header that comes back. Its vectors are read into what ``into`` returns."""
        with _translated(self.address, self._encrypts):
            writer, reader = self._begin({**header, "vectors": declare(vectors)}, timeout)
            try:
                try:
                    writer.begin(SCHEMA)
                    _write_vectors(writer, vectors)
                    writer.done_writing()
                except OSError:
                    reader.read_chunk()  # raises the reason, which only this direction has
                    raise
                back = decode(reader.read_chunk().app_metadata)
                where = into(back)
                expect(back, where)
                _read(reader, where, contextlib.nullcontext)
                writer.close()
            except BaseException:
                reader.cancel()
                with contextlib.suppress(OSError, pa.ArrowException):
                    writer.close()
                raise
            finally:
                self._in_flight.discard(reader)
            return back

    def heartbeat(self, header: Mapping[str, Any], beat: Callable[[], Header | None], heard: Callable[[Header], None]) -> None:
        """Send every beat and pass its answer to ``heard``; return when ``beat`` gives None, raise if the connection breaks."""
        with _translated(self.address, self._encrypts):
            writer, reader = self._begin({**header, "heartbeat": True}, None)
            try:
                with writer:
                    while (fields := beat()) is not None:
                        writer.write_metadata(encode(fields))
                        heard(decode(reader.read_chunk().app_metadata))
            finally:
                self._in_flight.discard(reader)

    def close(self) -> None:
        """Close the connection; calls in flight in other threads end, even if the other side is silent."""
        self._closed = True
        for reader in tuple(self._in_flight):
            reader.cancel()
        self._client.close()

    def _begin(self, header: Header, timeout: float | None) -> tuple[Any, Any]:
        descriptor = fl.FlightDescriptor.for_command(encode(header))
        writer, reader = self._client.do_exchange(descriptor, self._options(timeout))
        self._in_flight.add(reader)
        if self._closed:
            reader.cancel()
        return writer, reader

    def _options(self, timeout: float | None) -> Any:
        return fl.FlightCallOptions(timeout=timeout, headers=self._headers)


@contextlib.contextmanager
def _translated(address: str, encrypts: bool) -> Iterator[None]:
    """Translate errors of Flight into ``TransportError``, ``Refused`` and ``Malformed``."""
    try:
        yield
    except fl.FlightUnauthenticatedError:
        raise Refused(f"The center at {address} does not know the token.") from None
    except (fl.FlightServerError, fl.FlightInternalError) as error:
        text = str(error)
        for mark, kind in ((MALFORMED, Malformed), (REFUSED, Refused)):
            if mark in text:
                words = text.split(mark, 1)[1].split(". Detail:")[0].split(" gRPC client debug context")[0]
                raise kind(words) from None
        raise TransportError(f"The exchange with {address} failed: {_first_line(text)}.") from None
    except (fl.FlightError, pa.ArrowException, OSError, StopIteration) as error:
        text = str(error)
        if "certificate verify failed" in text.lower():
            raise Refused(
                f"The center at {address} shows another certificate than the trusted one: give --cert the file center.pem of "
                "its run directory, or the certificate that it was started with."
            ) from None
        if "wrong version number" in text.lower():
            raise Refused(f"The center at {address} does not encrypt, but a certificate was given: omit --cert.") from None
        hint = " If it encrypts, give its certificate: --cert FILE." if "Socket closed" in text and not encrypts else ""
        raise TransportError(f"The center at {address} cannot be reached: {_first_line(text)}.{hint}") from None


def _first_line(text: str) -> str:
    line = text.split("\n", 1)[0].split(". gRPC client debug context")[0]
    return line.removeprefix("Flight returned unavailable error, with message: ")[:200].rstrip(".")
