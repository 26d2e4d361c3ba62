"""A shard that is started by hand: finds its center, announces its address, and serves until the run is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paragrad import codecs, schemes
from paragrad.config import options
from paragrad.engines.sharding.process import ShardService
from paragrad.engines.transport import endpoint, transport
from paragrad.engines.transport.connection import PATIENCE, Connection, RunEnded
from paragrad.engines.transport.endpoint import CERTIFICATE, KEY, TOKEN, Endpoint, read_token
from paragrad.engines.transport.message import TransportError
from paragrad.errors import UsageError
from paragrad.optim.choice import Optimizer
from paragrad.optim.optimizer import prepared
from paragrad.schemes.scheme import Scheme

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
    """Hold slice ``index`` of the center of a run directory, until the run is over."""
    connection = Connection(directory, patience=patience, say=say)
    try:
        about = connection.about()
    except RunEnded:
        raise UsageError(f"The run in {str(directory)!r} is over.") from None
    scheme = options.parse(about["scheme"], "scheme", schemes)
    encrypts = Endpoint.read(directory).certificate is not None
    pair = endpoint.read_pair(directory / CERTIFICATE, directory / KEY) if encrypts else None
    host, port = endpoint.split_address(listen or ("127.0.0.1:0" if pair is None else "0.0.0.0:0"))
    codec = about["settings"].get("codec")
    codec = None if codec is None else options.parse(codec, "codec", codecs)
    service = ShardService(scheme, directory.resolve(), index, about["start_id"], _optimizer(scheme, about), codec)
    try:
        listener = transport.default().listen(service, endpoint.address_of(host, port), read_token(directory / TOKEN), pair)
    except TransportError as error:
        raise UsageError(f"{error} Give another address to --listen.") from None
    address = endpoint.address_of(advertise or endpoint.advertised(host), listener.port)
    say(f"Shard {index} of {directory} listens at {address}.")
    heard_at = time.monotonic()
    while not service.ended.wait(BEAT if service.held is not None else 0.1):
        try:
            start_id = connection.announce_shard(index, address)
            heard_at = time.monotonic()
            if start_id != service.start_id:
                about = connection.about()  # a run may be resumed with another learning rate
                with service.lock:
                    service.serve(about["start_id"], _optimizer(scheme, about))
        except (TransportError, RunEnded) as error:
            if time.monotonic() - heard_at > patience:
                raise TransportError(f"{error} This shard waited for {patience:.0f} seconds.") from None
            connection.disconnect()
    listener.close()
    service.discard()
    say("The run is over.")


def _optimizer(scheme: Scheme, about: Mapping[str, Any]) -> Optimizer | None:
    """Return the center's optimiser, if it has one; the center has checked that it is given by name."""
    return prepared(Optimizer.from_settings(about["settings"])) if scheme.ships == "gradient" else None
