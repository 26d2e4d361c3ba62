"""TopK: the largest elements, and nothing of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from paragrad.codecs import positions
from paragrad.codecs.codec import Codec, Piece
from paragrad.errors import UsageError
from paragrad.types import Vector


@dataclass(frozen=True)
class TopK(Codec):
    """Sent are the k elements with the largest |v|, k a share of all: their positions and values.

    Aji, Heafield, *Sparse Communication for Distributed Gradient Descent* (EMNLP 2017), arXiv:1704.05021; Stich, Cordonnier,
    Jaggi, *Sparsified SGD with Memory* (NeurIPS 2018), arXiv:1809.07599. Eight bytes for each element that is sent: with a
    share of 0.01 a fiftieth of all bytes. Of equals, those that come first are sent.

    Choose it where bytes are what a run waits for.
    Not for very short runs: what was not large enough yet when they end is not in the center.
    """

    share: float = 0.01
    """Of all elements, how many are sent."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"share={self.share}, but it is a share of all elements, above 0 and at most 1.")

    def count(self, length: int) -> int:
        """How many elements of a vector are sent; at least one."""
        return min(length, max(1, round(self.share * length)))

    def layout(self, length: int) -> dict[str, Piece]:
        count = self.count(length)
        return {
            "positions": Piece(positions.type_for(length), count, exact=False),
            "values": Piece(torch.float32, count, exact=False),
        }

    def pack(self, vector: Vector) -> dict[str, torch.Tensor]:
        where = self._largest(vector.abs(), self.count(vector.numel()))
        return {"positions": where.to(positions.type_for(vector.numel())), "values": positions.as_floats(vector[where])}

    def _largest(self, sizes: Vector, count: int) -> torch.Tensor:
        """Positions of the largest, in order."""
        rank = sizes.numel() - count
        if not count:
            return torch.empty(0, dtype=torch.int64, device=sizes.device)
        if sizes.is_cuda:
            least = sizes.kthvalue(rank + 1).values.item()
        else:
            # NumPy finds the smallest that is sent in a tenth of the time that torch.topk takes.
            least = np.partition(sizes.numpy(), rank)[rank].item()
        if math.isnan(least):
            return torch.arange(count, device=sizes.device)
        where = positions.where(sizes >= least)
        if where.numel() == count:
            return where
        equal = sizes[where] == least
        return where[~equal | (equal.cumsum(0) <= count - (where.numel() - int(equal.sum())))]

    def unpack(self, coded: Mapping[str, torch.Tensor], out: Vector) -> None:
        positions.place(self, coded["positions"], coded["values"], out)

    @property
    def unit(self) -> int:
        return 1

    def cut(self, coded: Mapping[str, torch.Tensor], lo: int, hi: int) -> dict[str, torch.Tensor]:
        which, where = positions.cut(coded["positions"], lo, hi)
        return {"positions": where, "values": coded["values"][which]}

    @property
    def of_slices(self) -> Codec:
        """The largest may all lie in one slice."""
        return TopK(1.0)
