"""A shard that is started by hand: finds its center, says where it listens, and serves until the run is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paragrad import codecs, options, schemes
from paragrad.codecs.codec import Codec
from paragrad.engines.line import PATIENCE, Ended, Line
from paragrad.engines.shard import Keeper
from paragrad.errors import UsageError
from paragrad.optim.choice import Optimizer
from paragrad.optim.optimizer import prepared
from paragrad.schemes.scheme import Scheme
from paragrad.transport import endpoint
from paragrad.transport.endpoint import CERTIFICATE, KEY, TOKEN, Endpoint, read_token
from paragrad.transport.message import TransportError

BEAT = 1.0
"""Seconds between two announcements."""


def serve(
    directory: Path,
    index: int,
    *,
    listen: str | None = None,
    advertise: str | None = None,
    patience: float = PATIENCE,
    say: Callable[[str], None] = print,
) -> None:
    """Hold slice ``index`` of the center of a run directory, until that says that the run is over."""
    from paragrad.transport import flight

    line = Line(directory, patience=patience, say=say)
    try:
        about = line.about()
    except Ended:
        raise UsageError(f"The run in {str(directory)!r} is over.") from None
    scheme = options.parse(about["scheme"], "scheme", schemes)
    pair = _pair(directory)
    host, port = endpoint.split_address(listen or ("127.0.0.1:0" if pair is None else "0.0.0.0:0"))
    keeper = Keeper(scheme, directory.resolve(), index, about["life"], _optimizer(scheme, about), _codec(about))
    try:
        server = flight.Server.listen(keeper, endpoint.address_of(host, port), read_token(directory / TOKEN), pair)
    except TransportError as error:
        raise UsageError(f"{error} Give another address to --listen.") from None
    address = endpoint.address_of(advertise or endpoint.advertised(host), server.port)
    say(f"Shard {index} of {directory} listens at {address}.")
    seen = time.monotonic()
    while not keeper.ended.wait(BEAT if keeper.held is not None else 0.1):
        try:
            life = line.announce(index, address)
            seen = time.monotonic()
            if life != keeper.life:
                about = line.about()  # a run may be resumed with another learning rate
                with keeper.lock:
                    keeper.live(about["life"], _optimizer(scheme, about))
        except (TransportError, Ended) as error:
            if time.monotonic() - seen > patience:
                raise TransportError(f"{error} It was waited for {patience:.0f} seconds.") from None
            line.hang_up()
    flight.stop(server)
    keeper.discard()
    say("The run is over.")


def _optimizer(scheme: Scheme, about: Mapping[str, Any]) -> Optimizer | None:
    """What the center steps with, where it does; it has made sure that words say all of it."""
    return prepared(Optimizer.from_settings(about["settings"])) if scheme.ships == "gradient" else None


def _codec(about: Mapping[str, Any]) -> Codec | None:
    spelled = about["settings"].get("codec")
    return None if spelled is None else options.parse(spelled, "codec", codecs)


def _pair(directory: Path) -> tuple[bytes, bytes] | None:
    """The certificate and key that the center has made for the run."""
    if Endpoint.read(directory).certificate is None:
        return None
    try:
        return (directory / CERTIFICATE).read_bytes(), (directory / KEY).read_bytes()
    except OSError as error:
        raise UsageError(f"The certificate or key in {str(directory)!r} cannot be read ({error}).") from None
