"""Threshold: the elements that have become large enough, and nothing of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paragrad.codecs import positions
from paragrad.codecs.codec import Codec, Piece, pieces
from paragrad.errors import UsageError
from paragrad.types import Vector


@dataclass(frozen=True)
class Threshold(Codec):
    """Sent are the positions of the elements with |v| >= τ, and of each its sign, or (``values``) itself;  v is ±τ there.

    Strom, *Scalable Distributed DNN Training Using Commodity GPU Cloud Computing* (Interspeech 2015). What is below τ waits
    until it has added up to it. How many bytes that is depends on the run: four for each element that is sent, eight with
    ``values``.

    Choose it where most elements hardly move, and how many do changes during a run.
    Not without trying τ: too small and it sends everything, too large and nothing. Take topk, whose share is what it says.
    """

    threshold: float = 0.01
    """τ: from where on an element is sent."""
    values: bool = True
    """Send the elements themselves; False: ±τ of each, as Strom does, in half of the bytes."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf:
            raise UsageError(f"threshold={self.threshold}, but it is a number above 0.")

    def layout(self, length: int) -> dict[str, Piece]:
        where = Piece(positions.type_for(length), length, exact=False)
        if self.values:
            return {"positions": where, "values": Piece(torch.float32, length, exact=False)}
        return {"positions": where, "step": Piece(torch.float32, 1)}

    def pack(self, vector: Vector) -> dict[str, torch.Tensor]:
        # Written so that what is NaN is sent.
        chosen = torch.empty(vector.numel(), dtype=torch.bool, device=vector.device)
        for here in pieces(vector):
            torch.lt(vector[here].abs(), self.threshold, out=chosen[here])
        where = positions.where(chosen.logical_not_())
        kind = positions.type_for(vector.numel())
        if self.values:
            return {"positions": where.to(kind), "values": positions.as_floats(vector[where])}
        # ~i is below 0 for every position i: that is the sign.
        signed = torch.where(vector[where] < 0, ~where, where)
        step = math.nan if bool(vector[:1].isnan().any()) else self.threshold
        return {"positions": signed.to(kind), "step": torch.tensor([step], dtype=torch.float32)}

    def unpack(self, coded: Mapping[str, torch.Tensor], out: Vector) -> None:
        where = coded["positions"]
        if self.values:
            positions.place(self, where, coded["values"], out)
            return
        step = coded["step"].to(out.dtype)
        below = where < 0
        positions.place(self, _unsigned(where), torch.where(below, -step, step), out)

    @property
    def unit(self) -> int:
        return 1

    def cut(self, coded: Mapping[str, torch.Tensor], lo: int, hi: int) -> dict[str, torch.Tensor]:
        which, where = positions.cut(_unsigned(coded["positions"]), lo, hi)
        if self.values:
            return {"positions": where, "values": coded["values"][which]}
        return {"positions": torch.where(coded["positions"][which] < 0, ~where, where), "step": coded["step"]}


def _unsigned(where: torch.Tensor) -> torch.Tensor:
    return torch.where(where < 0, ~where, where)
