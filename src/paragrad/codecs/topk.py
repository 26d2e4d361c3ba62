"""TopK: only the largest elements."""

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
    """Sent are the positions and values of the k elements with the largest |v|, where k is a share of all elements.

    Aji, Heafield, *Sparse Communication for Distributed Gradient Descent* (EMNLP 2017), arXiv:1704.05021; Stich, Cordonnier,
    Jaggi, *Sparsified SGD with Memory* (NeurIPS 2018), arXiv:1809.07599. Eight bytes per element that is sent: with a share of
    0.01 one fiftieth of all bytes. Of equal elements, the first ones are sent.

    Choose it if communication limits the run.
    Not for very short runs: movement that is not yet large enough at the end never reaches the center.
    """

    share: float = 0.01
    """Share of the elements that is sent."""

    unit = 1

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"share={self.share}, but it must be a share of all elements, above 0 and at most 1.")

    def count(self, length: int) -> int:
        """Return the number of elements that are sent; at least one."""
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
        """Return the positions of the largest elements, in order."""
        rank = sizes.numel() - count
        if not count:
            return torch.empty(0, dtype=torch.int64, device=sizes.device)
        if sizes.is_cuda:
            least = sizes.kthvalue(rank + 1).values.item()
        else:
            # np.partition takes a tenth of the time of torch.topk.
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

    def cut(self, coded: Mapping[str, torch.Tensor], lo: int, hi: int) -> dict[str, torch.Tensor]:
        which, where = positions.cut(coded["positions"], lo, hi)
        return {"positions": where, "values": coded["values"][which]}

    @property
    def of_slices(self) -> Codec:
        """Codec of a slice, which may contain all of the largest elements."""
        return TopK(1.0)
