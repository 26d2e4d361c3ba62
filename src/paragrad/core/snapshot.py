"""A snapshot of the center: everything a run needs to continue. Checkpoints and durable state hold one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from paragrad.types import Vector, WorkerState

SLOT, ANSWER, OPTIMIZER, RESIDUAL, WORKER = "slot.", "answer.", "optimizer.", "residual.", "worker."
"""Prefixes of tensor names in a file."""


@dataclass(slots=True)
class OwedReply:
    """A reply that the center owes a worker, or gave last."""

    sequence: int
    """Sequence of the commit, or a negative number for a worker that joins."""
    own: bool
    """True if the reply is in the worker's row of answers; otherwise the center's value is copied there first."""
    version: int
    applied: bool = True
    placed: bool = False
    sits_out: int | None = None
    """Clock of a round that has no mini-batches for this worker."""
    progress: float | None = None
    """Progress of the run in the reply when it was first given; a repeated reply states the same."""


@dataclass
class Presence:
    """Live workers and the replies owed to them: known after a restart from memory, but not from a checkpoint."""

    live: list[int]
    incarnations: list[int]
    refusals: list[int]
    rejected: list[int]
    owed: dict[int, OwedReply]
    resting: dict[int, OwedReply]
    given: list[OwedReply | None]
    looked_ahead: list[bool]
    gone_on: list[tuple[int, tuple[int, ...]]]
    """Workers that continued while their commits waited in a round, with the mini-batches to train again."""
    forgotten: list[int]
    """Arrival numbers of the commits that waited in a round."""

    def plain(self) -> dict[str, Any]:
        """Return the fields in types that JSON has."""
        found = _shallow(self)
        for name in ("owed", "resting"):
            found[name] = {str(worker): asdict(owed) for worker, owed in found[name].items()}
        return found | {"given": [None if given is None else asdict(given) for given in self.given]}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Presence:
        """Return the presence that ``plain`` returned."""
        found = dict(plain)
        for name in ("owed", "resting"):
            found[name] = {int(worker): OwedReply(**owed) for worker, owed in plain[name].items()}
        found["given"] = [None if given is None else OwedReply(**given) for given in plain["given"]]
        found["gone_on"] = [(worker, tuple(batches)) for worker, batches in plain["gone_on"]]
        return cls(**found)


@dataclass
class CenterNumbers:
    """The plain numbers of a snapshot."""

    clock: int
    ledger: list[int]
    """Sequence of the last applied commit of each worker."""
    leases: dict[str, Any]
    counts: dict[str, int]
    arrivals: int
    commits: list[int]
    speeds: list[float]
    sitting: list[int]
    """Workers for which the round has no mini-batches."""
    presence: Presence | None = None
    """Only in durable state: workers that continue a checkpoint join anew."""

    def plain(self) -> dict[str, Any]:
        """Return the fields in types that JSON has."""
        return _shallow(self) | {"presence": None if self.presence is None else self.presence.plain()}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> CenterNumbers:
        """Return the numbers that ``plain`` returned."""
        presence = plain.get("presence")
        return cls(**{**plain, "presence": None if presence is None else Presence.read(presence)})


@dataclass
class CenterSnapshot:
    """The center at one update, without the commits that wait in a round."""

    numbers: CenterNumbers
    value: Vector
    buffers: Vector
    integers: Vector
    slots: dict[str, Vector] = field(default_factory=dict)
    """Vectors that the center keeps for the scheme."""
    answers: dict[int, Vector] = field(default_factory=dict)
    """Last reply per worker, for schemes that need it."""
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    """State of the center's optimiser."""
    residuals: dict[int, Vector] = field(default_factory=dict)
    """Part of the applied commits that a codec left out, per worker."""
    workers: dict[int, WorkerState] = field(default_factory=dict)
    """Private state of each worker at its last applied commit."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by their names in a file."""
        named = {"value": self.value, "buffers": self.buffers, "integers": self.integers}
        named |= {f"{SLOT}{name}": tensor for name, tensor in self.slots.items()}
        named |= {f"{ANSWER}{worker}": tensor for worker, tensor in self.answers.items()}
        named |= {f"{OPTIMIZER}{name}": tensor for name, tensor in self.optimizer.items()}
        named |= {f"{RESIDUAL}{worker}": tensor for worker, tensor in self.residuals.items()}
        named |= {f"{WORKER}{worker}.{name}": t for worker, state in self.workers.items() for name, t in state.items()}
        return named

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor], numbers: CenterNumbers) -> CenterSnapshot:
        """Read a snapshot from named tensors; names without a known prefix are ignored."""
        workers: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in _with_prefix(tensors, WORKER).items():
            worker, _, inner = name.partition(".")
            workers.setdefault(int(worker), {})[inner] = tensor
        return cls(
            numbers=numbers,
            value=tensors["value"],
            buffers=tensors["buffers"],
            integers=tensors["integers"],
            slots=_with_prefix(tensors, SLOT),
            answers={int(worker): tensor for worker, tensor in _with_prefix(tensors, ANSWER).items()},
            optimizer=_with_prefix(tensors, OPTIMIZER),
            residuals={int(worker): tensor for worker, tensor in _with_prefix(tensors, RESIDUAL).items()},
            workers=dict(workers),
        )


def _shallow(thing: Any) -> dict[str, Any]:
    # ``asdict`` would copy every number, and over a network this runs at each commit.
    return {one.name: getattr(thing, one.name) for one in fields(thing)}


def _with_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
