"""Vectors and private state of commits and replies on the wire. All that a header declares is checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from paragrad.codecs.codec import Codec, size
from paragrad.core.layout import Layout as FieldLayout
from paragrad.engines.exchange.slot import Slot
from paragrad.engines.transport.message import NAMES, Malformed, declared
from paragrad.errors import UsageError
from paragrad.types import WorkerState

CODED = "coded."
"""Prefix of the tensors of an encoded value."""
STATE = "state."
"""Prefix of the tensors of a worker's private state."""
MOST, SMALL = 256, 1 << 20
"""Limits of a worker's private state: a multiple of the model's weights (an optimiser may remember many steps), plus bytes."""


def commit_vectors(
    slot: Slot, count: int, coded: Mapping[str, torch.Tensor] | None, private: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the vectors of a commit of ``count`` values by their names on the wire: in a slot, or encoded, and private."""
    vectors = {"value": slot.value[:count]} if coded is None else {CODED + name: tensor for name, tensor in coded.items()}
    vectors |= {f"also.{name}": vector[:count] for name, vector in slot.also.items()}
    vectors |= {"buffers": slot.buffers, "integers": slot.integers, **private}
    return {name: vector for name, vector in vectors.items() if vector.numel() or name.startswith(CODED)}


def reply_vectors(slot: Slot, value: torch.Tensor, private: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the vectors of a reply by their names on the wire."""
    vectors = {"value": value, "buffers": slot.reply_buffers, "integers": slot.reply_integers}
    return {name: vector for name, vector in vectors.items() if vector.numel()} | dict(private)


def most_bytes(weights: int, itemsize: int) -> int:
    """Return the limit in bytes of a worker's private state, for a model with this number of weights."""
    return MOST * weights * itemsize + SMALL


def put_state(state: WorkerState | None, most: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return header fields and vectors of a worker's private state; an empty state if it cannot be sent."""
    if state is None:
        return {}, {}
    if size(state) > most or any(tensor.dtype not in NAMES or not tensor.numel() for tensor in state.values()):
        return {"state": {}}, {}
    vectors = {STATE + name: tensor.contiguous().view(-1) for name, tensor in state.items()}
    return {"state": {name: list(tensor.shape) for name, tensor in state.items()}}, vectors


def rooms_for_state(header: dict[str, Any], most: int) -> dict[str, torch.Tensor] | None:
    """Return memory for the private state that a header declares; None if it declares none."""
    shapes = header.get("state")
    if shapes is None:
        return None
    kinds = {name.removeprefix(STATE): kind for name, kind in declared(header).items() if name.startswith(STATE)}
    total = sum(dtype.itemsize * length for dtype, length in kinds.values())
    if not isinstance(shapes, dict) or set(shapes) != set(kinds) or total > most:
        raise Malformed(f"A worker's private state is not declared, or has more than {most:,} bytes.")
    rooms = {}
    for name, shape in shapes.items():
        dtype, length = kinds[name]
        if math.prod(whole_numbers({name: shape}, name, 16)) != length:
            raise Malformed(f"{name[:40]!r} of {length:,} values cannot have the shape {str(shape)[:40]}.")
        rooms[name] = torch.empty(shape, dtype=dtype)
    return rooms


def flat(rooms: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Return the same memory as vectors by their names on the wire."""
    return {STATE + name: room.view(-1) for name, room in (rooms or {}).items()}


def rooms_for(header: dict[str, Any], codec: Codec, length: int) -> dict[str, torch.Tensor]:
    """Return memory for an encoded value; raise ``Malformed`` if the codec cannot make it from a vector of this length."""
    kinds, rooms = declared(header), {}
    for name, piece in codec.layout(length).items():
        dtype, count = kinds.get(CODED + name, (None, 0))
        if dtype is not piece.dtype or count > piece.length:
            raise Malformed(
                f"{CODED + name} is not what {codec.name} makes of {length:,} values: worker and center must have the same "
                "codec and model."
            )
        rooms[name] = torch.empty(count, dtype=piece.dtype)
    return rooms


def decoded(codec: Codec, coded: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the decoded value, in new memory; raise ``Malformed`` if it cannot be decoded."""
    try:
        return codec.decode(coded, torch.empty_like(like))
    except UsageError as error:
        raise Malformed(str(error)) from None


def read(layout: FieldLayout, header: Mapping[str, Any], most: Mapping[str, int]) -> dict[str, Any]:
    """Return the numbers and lists of a header; raise ``Malformed`` if one is missing, of another type or out of range."""
    try:
        return layout.read(header, most)
    except ValueError as error:
        raise Malformed(str(error)) from None


def whole_number(header: dict[str, Any], name: str, least: int) -> int:
    """Return an integer of a header; raise ``Malformed`` if it is none, or below ``least``."""
    value = header.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
        raise Malformed(f"{name} is {str(value)[:20]!r}, but it must be a whole number of at least {least}.")
    return value


def whole_numbers(header: dict[str, Any], name: str, most: int) -> tuple[int, ...]:
    """Return a list of integers of a header; raise ``Malformed`` if it is none, or longer than ``most``."""
    values = header.get(name)
    if not isinstance(values, list) or len(values) > most:
        raise Malformed(f"{name} is not a list of at most {most} whole numbers.")
    return tuple(whole_number({name: value}, name, 0) for value in values)
