"""Threshold: only the elements that are large enough."""

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
    """Sent are the positions of the elements with |v| >= τ, and their values, or (``values=False``) their signs for ±τ.

    Strom, *Scalable Distributed DNN Training Using Commodity GPU Cloud Computing* (Interspeech 2015). Smaller elements add up
    until they reach τ. The number of bytes depends on the run: four per element that is sent, eight with ``values``.

    Choose it if most elements hardly move, and the number of those that do changes during a run.
    Not without trying values of τ: if it is too small, everything is sent; if too large, nothing. Take topk for a fixed share.
    """

    threshold: float = 0.01
    """τ: smallest |v| of an element that is sent."""
    values: bool = True
    """Send the values of the elements; False: only ±τ, as in the paper, with half of the bytes."""

    unit = 1

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf:
            raise UsageError(f"threshold={self.threshold}, but it must be a number above 0.")

    def layout(self, length: int) -> dict[str, Piece]:
        where = Piece(positions.type_for(length), length, exact=False)
        if self.values:
            return {"positions": where, "values": Piece(torch.float32, length, exact=False)}
        return {"positions": where, "step": Piece(torch.float32, 1)}

    def pack(self, vector: Vector) -> dict[str, torch.Tensor]:
        # Negated at the end, so that NaN is sent.
        chosen = torch.empty(vector.numel(), dtype=torch.bool, device=vector.device)
        for here in pieces(vector):
            torch.lt(vector[here].abs(), self.threshold, out=chosen[here])
        where = positions.where(chosen.logical_not_())
        kind = positions.type_for(vector.numel())
        if self.values:
            return {"positions": where.to(kind), "values": positions.as_floats(vector[where])}
        # ~i is negative for every position i, and so encodes the sign.
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

    def cut(self, coded: Mapping[str, torch.Tensor], lo: int, hi: int) -> dict[str, torch.Tensor]:
        which, where = positions.cut(_unsigned(coded["positions"]), lo, hi)
        if self.values:
            return {"positions": where, "values": coded["values"][which]}
        return {"positions": torch.where(coded["positions"][which] < 0, ~where, where), "step": coded["step"]}


def _unsigned(where: torch.Tensor) -> torch.Tensor:
    return torch.where(where < 0, ~where, where)
