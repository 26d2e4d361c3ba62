"""A snapshot of the center: all that a run needs to continue. It is what checkpoints and durable state hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from paragrad.types import Vector, WorkerState

SLOT, ANSWER, OPTIMIZER, RESIDUAL, WORKER = "slot.", "answer.", "optimizer.", "residual.", "worker."
"""Prefixes of tensors in a file."""


@dataclass(slots=True)
class OwedReply:
    """A reply that is owed to a worker, or was given."""

    sequence: int
    """Of the commit; below 0: of joining."""
    own: bool
    """Whether the reply is in the worker's own row; otherwise the center is copied there first."""
    version: int
    applied: bool = True
    placed: bool = False
    sits_out: int | None = None
    """Clock of a round that has nothing for this worker."""
    progress: float | None = None
    """Progress of the run that a reply stated which is given again: the same is stated."""


@dataclass
class Presence:
    """Who is present and is owed what: what a center that is restarted from memory knows besides."""

    live: list[int]
    incarnations: list[int]
    refusals: list[int]
    rejected: list[int]
    owed: dict[int, OwedReply]
    resting: dict[int, OwedReply]
    given: list[OwedReply | None]
    looked_ahead: list[bool]
    gone_on: list[tuple[int, tuple[int, ...]]]
    """Workers that went on while their commits waited in a round, and the mini-batches of these: they are done again."""
    forgotten: list[int]
    """Arrivals of the commits that waited in a round."""

    def plain(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        found = _shallow(self)
        for name in ("owed", "resting"):
            found[name] = {str(worker): asdict(owed) for worker, owed in found[name].items()}
        return found | {"given": [None if given is None else asdict(given) for given in self.given]}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Presence:
        """The inverse of ``plain``."""
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
    """Workers for which the round has nothing."""
    presence: Presence | None = None
    """Only in durable state: a checkpoint is continued by workers that join anew."""

    def plain(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return _shallow(self) | {"presence": None if self.presence is None else self.presence.plain()}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> CenterNumbers:
        """The inverse of ``plain``."""
        presence = plain.get("presence")
        return cls(**{**plain, "presence": None if presence is None else Presence.read(presence)})


@dataclass
class CenterSnapshot:
    """The center at one update. Commits that wait in a round are not in it."""

    numbers: CenterNumbers
    value: Vector
    buffers: Vector
    integers: Vector
    slots: dict[str, Vector] = field(default_factory=dict)
    """Vectors that the center keeps for the scheme."""
    answers: dict[int, Vector] = field(default_factory=dict)
    """Last reply per worker, for schemes that need it."""
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    """State of the optimiser that the center holds."""
    residuals: dict[int, Vector] = field(default_factory=dict)
    """What a codec has left out of the applied commits, per worker."""
    workers: dict[int, WorkerState] = field(default_factory=dict)
    """Private state of each worker at its last applied commit."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by the names that they have in a file."""
        named = {"value": self.value, "buffers": self.buffers, "integers": self.integers}
        named |= {f"{SLOT}{name}": tensor for name, tensor in self.slots.items()}
        named |= {f"{ANSWER}{worker}": tensor for worker, tensor in self.answers.items()}
        named |= {f"{OPTIMIZER}{name}": tensor for name, tensor in self.optimizer.items()}
        named |= {f"{RESIDUAL}{worker}": tensor for worker, tensor in self.residuals.items()}
        named |= {f"{WORKER}{worker}.{name}": t for worker, state in self.workers.items() for name, t in state.items()}
        return named

    @classmethod
    def read(cls, tensors: Mapping[str, torch.Tensor], numbers: CenterNumbers) -> CenterSnapshot:
        """The inverse of ``tensors``; further tensors of a file are left aside."""
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
    """Return the fields of a dataclass; ``asdict`` would copy every number, and this is done at each commit over a network."""
    return {one.name: getattr(thing, one.name) for one in fields(thing)}


def _with_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
