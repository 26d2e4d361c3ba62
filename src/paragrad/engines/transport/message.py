"""What crosses the network: a head of plain JSON, and vectors whose lengths it declares before the first byte is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from paragrad.errors import ParagradError

PROTOCOL = 3
"""Of the messages; both sides must speak the same."""
CHUNK = 1 << 20
"""Bytes of a vector that travel in one piece, at most."""
HEAD = 1 << 20
"""Bytes of a head, at most."""

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
"""What a vector may be made of, by its name on the wire."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TransportError(ParagradError, ConnectionError):
    """The other side cannot be reached, or the connection broke: the same may be tried again."""


class Refused(ParagradError):
    """The other side has heard, and will not: trying again is of no use."""


class Malformed(Refused):
    """A message that is not what it must be."""


def encode(head: Mapping[str, Any]) -> bytes:
    """A head as bytes."""
    return json.dumps(head, separators=(",", ":")).encode()


def decode(data: Any) -> dict[str, Any]:
    """The inverse; raises where it is no head."""
    if data is None:
        raise Malformed("A message has no head.")
    raw = memoryview(data)
    if raw.nbytes > HEAD:
        raise Malformed(f"A head of {raw.nbytes:,} bytes, but one has at most {HEAD:,}.")
    try:
        head = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise Malformed(f"A head is not JSON: {error}.") from None
    if not isinstance(head, dict):
        raise Malformed("A head is not a JSON object.")
    return head


def declare(vectors: Vectors) -> list[list[Any]]:
    """What a head says of the vectors that follow it: name, type and length of each, in their order."""
    return [[name, NAMES[vector.dtype], vector.numel()] for name, vector in vectors.items()]


def declared(head: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, int]]:
    """The inverse; raises where it says nothing that could be."""
    found: dict[str, tuple[torch.dtype, int]] = {}
    entries = head.get("vectors", [])
    if not isinstance(entries, list):
        raise Malformed("The vectors of a message are no list.")
    for entry in entries:
        match entry:
            case [str(name), str(dtype), int(length)] if dtype in DTYPES and type(length) is int and name not in found:
                if length < 0:
                    raise Malformed(f"A vector {name[:40]!r} of {length} values is declared.")
                found[name] = DTYPES[dtype], length
            case _:
                raise Malformed(f"A vector is declared as {str(entry)[:80]!r}: a name, a type and a length are needed.")
    return found


def expect(head: Mapping[str, Any], into: Vectors) -> None:
    """Raise, before a byte is read, unless the vectors that are announced are those that there is room for."""
    found = declared(head)
    for name, vector in into.items():
        dtype, length = found.pop(name, (None, 0))
        if dtype is not vector.dtype or length != vector.numel():
            said = "nothing" if dtype is None else f"{length:,} values of {NAMES[dtype]}"
            raise Malformed(
                f"{said} for {name!r}, but {vector.numel():,} values of {NAMES[vector.dtype]} are needed. Every worker must "
                "build the same model."
            )
    if found:
        raise Malformed(f"{next(iter(found))!r} is none of the vectors that are needed ({', '.join(into) or 'none'}).")


def raw(vector: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a vector, in place."""
    return vector.detach().view(torch.uint8).numpy() if vector.numel() else np.empty(0, dtype=np.uint8)


def weight(vectors: Vectors) -> int:
    """Return the number of bytes of vectors."""
    return sum(vector.numel() * vector.element_size() for vector in vectors.values())
