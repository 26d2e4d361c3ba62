"""OneBit: the sign of each element, and two means for each block of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from paragrad.codecs.codec import Codec, Piece, blocks, check_block
from paragrad.types import Vector


@dataclass(frozen=True)
class OneBit(Codec):
    """Sent is a bit for each element, v > 0 or not, and for each block the mean of those above 0 and of the others.

    Seide, Fu, Droppo, Li, Yu, *1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
    Speech DNNs* (Interspeech 2014), who have a column of a weight matrix for a block. A thirtieth of the bytes.

    Choose it where bytes are scarce and nearly all elements move by about as much.
    Not where few elements carry the movement: all of a block are sent with the same magnitude. Take topk.
    """

    block: int = 2048
    """Elements that share two means."""

    def __post_init__(self) -> None:
        check_block(self.block)

    def layout(self, length: int) -> dict[str, Piece]:
        count = -(-length // self.block)
        return {
            "signs": Piece(torch.uint8, -(-length // 8)),
            "above": Piece(torch.float32, count),
            "below": Piece(torch.float32, count),
        }

    def pack(self, vector: Vector) -> dict[str, torch.Tensor]:
        means = torch.empty(2, -(-vector.numel() // self.block), dtype=torch.float32, device=vector.device)
        positive = torch.empty(vector.numel(), dtype=torch.bool, device=vector.device)
        for here, which in blocks(vector, self.block):
            rows = vector[here].view(which.stop - which.start, -1)
            mine = torch.gt(rows, 0, out=positive[here].view(rows.shape))
            above = mine.to(rows.dtype).sum(1)
            means[0, which] = _mean(rows.clamp(min=0), above)
            means[1, which] = _mean(rows.clamp(max=0), rows.shape[1] - above)
        return {"signs": torch.from_numpy(np.packbits(positive.cpu().numpy())), "above": means[0], "below": means[1]}

    def unpack(self, coded: Mapping[str, torch.Tensor], out: Vector) -> None:
        bits = torch.from_numpy(np.unpackbits(coded["signs"].cpu().numpy(), count=out.numel())).to(out.device)
        above, below = (coded[name].to(out.dtype) for name in ("above", "below"))
        for here, which in blocks(out, self.block):
            rows = out[here].view(which.stop - which.start, -1)
            mine = bits[here].view(rows.shape).to(out.dtype)
            # One of the two is multiplied by 1 and the other by 0, which takes a quarter of the time of choosing.
            torch.mul(mine, above[which].unsqueeze(1), out=rows)
            rows.addcmul_(1 - mine, below[which].unsqueeze(1))

    @property
    def unit(self) -> int:
        return math.lcm(self.block, 8)

    def cut(self, coded: Mapping[str, torch.Tensor], lo: int, hi: int) -> dict[str, torch.Tensor]:
        means = {name: coded[name][lo // self.block : -(-hi // self.block)] for name in ("above", "below")}
        return {"signs": coded["signs"][lo // 8 : -(-hi // 8)], **means}


def _mean(rows: Vector, count: Vector) -> Vector:
    """Of each row the mean of what is not 0, in float32."""
    total = rows.sum(1)
    if not bool(torch.isfinite(total).all()):
        total = rows.sum(1, dtype=torch.float64)
    largest = torch.finfo(torch.float32).max
    return (total / count.clamp(min=1)).clamp(-largest, largest).float()
