"""Where a center is found and how it is known: endpoint.json and a token in the run directory, certificates of its own."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paragrad.config.extras import command
from paragrad.engines.transport.message import TransportError
from paragrad.errors import UsageError

FILE, TOKEN, CERTIFICATE, KEY = "endpoint.json", "token", "center.pem", "center.key"
DAYS = 3650
HOSTNAME = "paragrad"
"""Name that a self-signed certificate is made out to, wherever the center runs."""


@dataclass(frozen=True)
class Endpoint:
    """What a worker needs to know of a center, besides the token."""

    address: str
    certificate: str | None = None
    """The certificate, or the authority, that is trusted; None: the connection is not encrypted."""
    hostname: str | None = None
    """The name in the certificate, where it is not that of the address."""
    shards: Sequence[str] = ()
    """Addresses of the other processes that hold slices of the center, where it is spread over several."""

    def write(self, directory: Path) -> None:
        """For workers that share a file system with the center; whole or not at all."""
        aside = directory / f".{FILE}.tmp"
        aside.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        aside.rename(directory / FILE)

    @classmethod
    def read(cls, directory: Path) -> Endpoint:
        """The inverse; raises where there is none, which is worth another attempt: on a file system of several machines a file
        may be listed and gone, or replaced, at the same time."""
        path = directory / FILE
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            found = cls(**{**told, "shards": tuple(told.get("shards", ()))})
            split_address(str(found.address))
            return found
        except OSError as error:
            raise TransportError(f"{str(path)!r} cannot be read now ({error.strerror}).") from None
        except (ValueError, TypeError, AttributeError, UsageError) as error:
            raise UsageError(f"{str(path)!r} does not say where a center is ({error}).") from None


def make_token(directory: Path) -> str:
    """A token of the run's own, in a file that only its owner reads; one that is there is kept, so that workers come back."""
    path = directory / TOKEN
    if path.exists():
        return read_token(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    token = secrets.token_urlsafe(32)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def run_name(directory: Path, token: str) -> str:
    """What a run is known by on machines of its workers; it tells nothing of the token."""
    return hashlib.sha256(f"{token} {directory.resolve()}".encode()).hexdigest()[:16]


def read_token(path: Path) -> str:
    """The token in a file; raises where others could read it, too."""
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"The token file {str(path)!r} cannot be read ({error}).") from None
    if mode & 0o077:
        raise UsageError(f"The token file {str(path)!r} can be read by others: chmod 600 {path}")
    if len(token) < 16:
        raise UsageError(f"The token in {str(path)!r} has {len(token)} characters, but at least 16 are needed.")
    return token


def split_address(text: str) -> tuple[str, int]:
    """``host:port``, also ``[::1]:port``."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not int(port) < 65_536:
        raise UsageError(f"{text!r} is no address; give HOST:PORT, as 127.0.0.1:7000, with port 0 for any that is free.")
    return host.strip("[]"), int(port)


def address_of(host: str, port: int | str) -> str:
    """The inverse."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def advertised(host: str) -> str:
    """The name by which others reach a center that listens there."""
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    return socket.gethostname() if everywhere else host


def self_signed(directory: Path, hostname: str = HOSTNAME) -> tuple[bytes, bytes]:
    """(certificate, key) made once for a run directory."""
    certificate, key = directory / CERTIFICATE, directory / KEY
    if not (certificate.exists() and key.exists()):
        _make_pair(certificate, key, hostname)
    return certificate.read_bytes(), key.read_bytes()


def given_pair(certificate: str, key: str) -> tuple[bytes, bytes]:
    """(certificate, key) of the user's own."""
    try:
        return Path(certificate).read_bytes(), Path(key).read_bytes()
    except OSError as error:
        raise UsageError(f"The certificate or its key cannot be read ({error}).") from None


def _make_pair(certificate: Path, key: Path, hostname: str) -> None:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise UsageError(
            f"A certificate is made with cryptography, which is missing: {command('network')} (or give a certificate and its "
            "key, or say tls=off)."
        ) from None
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hostname)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(hostname)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    fd = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(
            private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
