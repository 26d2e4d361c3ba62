"""The wire format: a header of plain JSON, and vectors whose lengths it declares before the first byte is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from paragrad.errors import ParagradError

PROTOCOL = 3
"""Version of the messages, which must be the same on both sides."""
CHUNK = 1 << 20
"""Largest number of bytes of a vector in one piece."""
HEAD = 1 << 20
"""Largest number of bytes of a header."""

Vectors: TypeAlias = Mapping[str, torch.Tensor]
"""Contiguous 1-D tensors in main memory, by name."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
"""Types of vectors by their names on the wire."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TransportError(ParagradError, ConnectionError):
    """The other side cannot be reached, or the connection broke; another attempt may succeed."""


class Refused(ParagradError):
    """The other side rejects the request; trying again is of no use."""


class Malformed(Refused):
    """A message does not have the required form."""


def encode(header: Mapping[str, Any]) -> bytes:
    """Return a header as bytes."""
    return json.dumps(header, separators=(",", ":")).encode()


def decode(data: Any) -> dict[str, Any]:
    """Return the header that was encoded; raise ``Malformed`` if it is none."""
    if data is None:
        raise Malformed("A message has no header.")
    raw = memoryview(data)
    if raw.nbytes > HEAD:
        raise Malformed(f"A header has {raw.nbytes:,} bytes, but at most {HEAD:,} are allowed.")
    try:
        header = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise Malformed(f"A header is not JSON: {error}.") from None
    if not isinstance(header, dict):
        raise Malformed("A header is not a JSON object.")
    return header


def declare(vectors: Vectors) -> list[list[Any]]:
    """Return the declaration of vectors for a header: name, type and length of each, in order."""
    return [[name, NAMES[vector.dtype], vector.numel()] for name, vector in vectors.items()]


def declared(header: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, int]]:
    """Return type and length of each vector that a header declares; raise ``Malformed`` if the declaration is invalid."""
    found: dict[str, tuple[torch.dtype, int]] = {}
    entries = header.get("vectors", [])
    if not isinstance(entries, list):
        raise Malformed("The vectors of a message are not a list.")
    for entry in entries:
        match entry:
            case [str(name), str(dtype), int(length)] if dtype in DTYPES and type(length) is int and name not in found:
                if length < 0:
                    raise Malformed(f"A vector {name[:40]!r} of {length} values is declared.")
                found[name] = DTYPES[dtype], length
            case _:
                raise Malformed(f"A vector is declared as {str(entry)[:80]!r}: a name, a type and a length are needed.")
    return found


def expect(header: Mapping[str, Any], into: Vectors) -> None:
    """Raise ``Malformed``, before a byte is read, unless a header declares exactly the vectors of ``into``."""
    found = declared(header)
    for name, vector in into.items():
        dtype, length = found.pop(name, (None, 0))
        if dtype is not vector.dtype or length != vector.numel():
            given = "nothing" if dtype is None else f"{length:,} values of {NAMES[dtype]}"
            raise Malformed(
                f"{given} for {name!r}, but {vector.numel():,} values of {NAMES[vector.dtype]} are needed. Every worker must "
                "build the same model."
            )
    if found:
        raise Malformed(f"{next(iter(found))!r} is none of the vectors that are needed ({', '.join(into) or 'none'}).")


def raw(vector: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a vector, in place."""
    return vector.detach().view(torch.uint8).numpy() if vector.numel() else np.empty(0, dtype=np.uint8)
