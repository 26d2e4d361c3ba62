"""What a header may declare besides numbers: encoded values, and a worker's private state. All of it is checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from paragrad.codecs.codec import Codec
from paragrad.core.layout import Layout as FieldLayout
from paragrad.engines.transport.message import NAMES, Malformed, declared
from paragrad.errors import UsageError
from paragrad.types import WorkerState

CODED = "coded."
"""Prefix of the tensors of an encoded value."""
STATE = "state."
"""Prefix of the tensors of a worker's private state."""
MOST, SMALL = 256, 1 << 20
"""Limits of a worker's private state: a multiple of the model's weights (an optimiser may remember many steps), plus bytes."""


def most_bytes(weights: int, itemsize: int) -> int:
    """Return the limit in bytes of a worker's private state, for a model with so many weights."""
    return MOST * weights * itemsize + SMALL


def put_state(state: WorkerState | None, most: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what a header declares of a worker's private state, and its vectors; an empty state where it cannot be sent."""
    if state is None:
        return {}, {}
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if size > most or any(tensor.dtype not in NAMES or not tensor.numel() for tensor in state.values()):
        return {"state": {}}, {}
    flat = {STATE + name: tensor.contiguous().view(-1) for name, tensor in state.items()}
    return {"state": {name: list(tensor.shape) for name, tensor in state.items()}}, flat


def rooms_for_state(head: dict[str, Any], most: int) -> dict[str, torch.Tensor] | None:
    """Return memory for a private state, of the declared lengths; None where the header declares none."""
    shapes = head.get("state")
    if shapes is None:
        return None
    said, rooms = declared(head), {}
    lengths = {name: kind[0].itemsize * kind[1] for name, kind in said.items() if name.startswith(STATE)}
    if not isinstance(shapes, dict) or {STATE + name for name in shapes} != set(lengths) or sum(lengths.values()) > most:
        raise Malformed(f"A worker's private state is not declared, or has more than {most:,} bytes.")
    for name, shape in shapes.items():
        dtype, length = said[STATE + name]
        if math.prod(whole_numbers({name: shape}, name, 16)) != length:
            raise Malformed(f"{name[:40]!r} of {length:,} values cannot have the shape {str(shape)[:40]}.")
        rooms[name] = torch.empty(shape, dtype=dtype)
    return rooms


def flat(rooms: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Return the same memory as vectors by their names on the wire."""
    return {STATE + name: room.view(-1) for name, room in (rooms or {}).items()}


def rooms_for(head: dict[str, Any], codec: Codec, length: int) -> dict[str, torch.Tensor]:
    """Return memory for an encoded value, of the declared lengths, as far as a vector of that length can become so long."""
    said, rooms = declared(head), {}
    for name, piece in codec.layout(length).items():
        dtype, count = said.get(CODED + name, (None, 0))
        if dtype is not piece.dtype or count > piece.length:
            raise Malformed(
                f"{CODED + name} is not what {codec.name} makes of {length:,} values: worker and center must have the same "
                "codec and model."
            )
        rooms[name] = torch.empty(count, dtype=piece.dtype)
    return rooms


def decoded(codec: Codec, coded: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the decoded value, in memory of its own; raise where it cannot be one."""
    try:
        return codec.decode(coded, torch.empty_like(like))
    except UsageError as error:
        raise Malformed(str(error)) from None


def read(layout: FieldLayout, header: Mapping[str, Any], most: Mapping[str, int]) -> dict[str, Any]:
    """Return the numbers and lists that a header declares; raise where one is missing, of another type or out of range."""
    try:
        return layout.read(header, most)
    except ValueError as error:
        raise Malformed(str(error)) from None


def whole_number(head: dict[str, Any], name: str, least: int) -> int:
    value = head.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
        raise Malformed(f"{name} is {str(value)[:20]!r}, but it is a whole number of at least {least}.")
    return value


def whole_numbers(head: dict[str, Any], name: str, most: int) -> tuple[int, ...]:
    values = head.get(name)
    if not isinstance(values, list) or len(values) > most:
        raise Malformed(f"{name} is no list of at most {most} whole numbers.")
    return tuple(whole_number({name: value}, name, 0) for value in values)
