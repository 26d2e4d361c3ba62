"""What the head of an exchange may say: a worker's commit in plain JSON, and back, with everything looked at."""

from __future__ import annotations

import math
from typing import Any

import torch

from paragrad.codecs.codec import Codec
from paragrad.engines.guests import Guest
from paragrad.engines.slot import Slot
from paragrad.errors import UsageError
from paragrad.job import Job
from paragrad.transport.message import Malformed, declared
from paragrad.types import Commit

CODED = "coded."
"""Before the names of the tensors that a codec makes of a value."""


def rooms_for(head: dict[str, Any], codec: Codec, length: int) -> dict[str, torch.Tensor]:
    """Room for a coded value, of the lengths that the head declares; no more than a vector of that length can become."""
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
    """A coded value that has come, in memory of its own; raises where it cannot be one."""
    try:
        return codec.decode(coded, torch.empty_like(like))
    except UsageError as error:
        raise Malformed(str(error)) from None


def commit_of(head: dict[str, Any], guest: Guest, slot: Slot, job: Job, window: int) -> Commit:
    """A commit, all but its vectors, of which the places are named; raises where it cannot be one."""
    whole: dict[str, Any] = {
        name: whole_number(head, name, 0) for name in ("sequence", "version", "steps", "rows", "part", "saw")
    }
    if whole["sequence"] < 1:
        raise Malformed("A commit is numbered from 1.")
    if whole["part"] >= job.scheme.parts:
        raise Malformed(f"Part {whole['part']}, but the vector has {job.scheme.parts}.")
    batches, pulls = (
        whole_numbers(head, name, most) for name, most in (("batches", window), ("pulls", slot.pulls.numel() - 1))
    )
    path = head.get("path")
    length, parts = slot.value.numel(), job.scheme.parts
    mine = length * (whole["part"] + 1) // parts - length * whole["part"] // parts
    return Commit(
        worker=guest.rank,
        incarnation=guest.incarnation,
        value=slot.value[:mine],
        also={name: vector[:mine] for name, vector in slot.also.items()},
        buffers=slot.buffers if slot.buffers.numel() else None,
        integers=slot.integers if slot.integers.numel() else None,
        batches=batches,
        pulls=pulls,
        path=_path(path, slot.path.numel() // 2) if path is not None else None,
        weight=_number(head, "weight"),
        loss=_number(head, "loss"),
        lr=_number(head, "lr"),
        seconds=_number(head, "seconds"),
        distance=_number(head, "distance"),
        **whole,
    )


def head_of(commit: Commit) -> dict[str, Any]:
    """What a worker says of its commit; the inverse."""
    names = ("sequence", "version", "steps", "rows", "part", "saw", "weight", "loss", "lr", "seconds", "distance")
    head: dict[str, Any] = {name: getattr(commit, name) for name in names}
    head |= {"batches": list(commit.batches), "pulls": list(commit.pulls)}
    return head if commit.path is None else head | {"path": [list(point) for point in commit.path]}


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


def _number(head: dict[str, Any], name: str) -> float:
    value = head.get(name, math.nan)
    try:
        if not isinstance(value, bool) and isinstance(value, int | float):
            return float(value)
    except OverflowError:  # a whole number of many digits
        pass
    raise Malformed(f"{name} is {str(value)[:20]!r}, but it is a number.")


def _path(given: Any, length: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    match given:
        case [list(first), list(last)] if len(first) == len(last) == length:
            first, last = ([_number({"path": value}, "path") for value in point] for point in (first, last))
            return tuple(first), tuple(last)
    raise Malformed(f"A path is not two points of {length} numbers.")
