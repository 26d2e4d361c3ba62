"""Address and credentials of a center: endpoint.json, a token and a certificate in the run directory."""

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
"""Days that a self-signed certificate is valid."""
HOSTNAME = "paragrad"
"""Name in a self-signed certificate, on whatever host the center runs."""


@dataclass(frozen=True)
class Endpoint:
    """Address and certificate of a center, which workers need to reach it."""

    address: str
    certificate: str | None = None
    """The trusted certificate, or that of its authority; None: the connection is not encrypted."""
    hostname: str | None = None
    """The name in the certificate, if it is not that of the address."""
    shards: Sequence[str] = ()
    """Addresses of the other shards of the center, if it has several."""

    def write(self, directory: Path) -> None:
        """Write endpoint.json atomically, for workers that share a file system with the center."""
        aside = directory / f".{FILE}.tmp"
        aside.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        aside.rename(directory / FILE)

    @classmethod
    def read(cls, directory: Path) -> Endpoint:
        """Read endpoint.json. Raise ``TransportError`` if it is missing, because another attempt may succeed: on a network file
        system a file may be listed and yet be gone, or be replaced meanwhile."""
        path = directory / FILE
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            found = cls(**{**fields, "shards": tuple(fields.get("shards", ()))})
            split_address(str(found.address))
            return found
        except OSError as error:
            raise TransportError(f"{str(path)!r} cannot be read now ({error.strerror}).") from None
        except (ValueError, TypeError, AttributeError, UsageError) as error:
            raise UsageError(f"{str(path)!r} does not contain the address of a center ({error}).") from None


def make_token(directory: Path) -> str:
    """Return the token of a run, in a file that only its owner can read. An existing one is kept, so that workers can
    reconnect."""
    path = directory / TOKEN
    if path.exists():
        return read_token(path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    token = secrets.token_urlsafe(32)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def run_name(directory: Path, token: str) -> str:
    """Return a name of a run for the machines of its workers; it does not reveal the token."""
    return hashlib.sha256(f"{token} {directory.resolve()}".encode()).hexdigest()[:16]


def read_token(path: Path) -> str:
    """Return the token in a file; raise ``UsageError`` if other users could read it, too."""
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
    """Return host and port of ``host:port`` or ``[::1]:port``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not int(port) < 65_536:
        raise UsageError(f"{text!r} is not an address. Give HOST:PORT, such as 127.0.0.1:7000; port 0 takes any free port.")
    return host.strip("[]"), int(port)


def address_of(host: str, port: int) -> str:
    """Return an address as ``host:port`` or ``[::1]:port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def advertised(host: str) -> str:
    """Return the name by which other machines reach a center that listens at a host."""
    try:
        return socket.gethostname() if ipaddress.ip_address(host).is_unspecified else host
    except ValueError:
        return host


def self_signed(directory: Path, hostname: str = HOSTNAME) -> tuple[bytes, bytes]:
    """Return the certificate and key of a run directory; make them if they are missing."""
    certificate, key = directory / CERTIFICATE, directory / KEY
    if not (certificate.exists() and key.exists()):
        _make_pair(certificate, key, hostname)
    return certificate.read_bytes(), key.read_bytes()


def read_pair(certificate: str | Path, key: str | Path) -> tuple[bytes, bytes]:
    """Read a certificate and its key."""
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
            f"Making a certificate needs cryptography, which is missing: {command('network')} (or give a certificate and its "
            "key, or set tls=off)."
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
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    fd = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(private.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    certificate.write_bytes(made.public_bytes(pem))
