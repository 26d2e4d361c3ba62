"""Int8: a byte for each element, and a scale for each block of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paragrad.codecs.codec import Codec, Piece, blocks, check_block
from paragrad.types import Vector

STEPS = 127
"""The largest whole number that an element becomes."""


@dataclass(frozen=True)
class Int8(Codec):
    """s = max |v| / 127 over a block;  sent is round(v / s), a whole number from -127 to 127, and s.

    A quarter of the bytes, and 4 more for each block. Rounded to the nearest, without chance. Dettmers, *8-Bit Approximations
    for Parallelism in Deep Learning* (ICLR 2016), arXiv:1511.04561, has several such forms; this is the linear one.

    Choose it for a quarter of the bytes at next to no cost in accuracy.
    Not with blocks of very unequal elements: one large value makes all others of its block coarse. Take a smaller block.
    """

    block: int = 2048
    """Elements that share a scale."""

    def __post_init__(self) -> None:
        check_block(self.block)

    def layout(self, length: int) -> dict[str, Piece]:
        return {"steps": Piece(torch.int8, length), "scales": Piece(torch.float32, -(-length // self.block))}

    def pack(self, vector: Vector) -> dict[str, torch.Tensor]:
        steps = torch.empty(vector.numel(), dtype=torch.int8, device=vector.device)
        scales = torch.empty(-(-vector.numel() // self.block), dtype=torch.float32, device=vector.device)
        largest = torch.finfo(torch.float32).max
        for here, which in blocks(vector, self.block):
            rows = vector[here].view(which.stop - which.start, -1)
            scale = (rows.abs().amax(1) / STEPS).clamp(max=largest).float()
            scales[which] = scale
            # A block of zeros, or of values so small that their scale is 0, is sent as zeros.
            safe = torch.where(scale > 0, scale, 1.0).to(vector.dtype).unsqueeze(1)
            steps[here] = torch.div(rows, safe).round_().clamp_(-STEPS, STEPS).nan_to_num_().view(-1)
        return {"steps": steps, "scales": scales}

    def unpack(self, coded: Mapping[str, torch.Tensor], out: Vector) -> None:
        scales = coded["scales"].to(out.dtype)
        for here, which in blocks(out, self.block):
            rows = coded["steps"][here].view(which.stop - which.start, -1)
            torch.mul(rows, scales[which].unsqueeze(1), out=out[here].view(rows.shape))

    @property
    def unit(self) -> int:
        return self.block

    def cut(self, coded: Mapping[str, torch.Tensor], lo: int, hi: int) -> dict[str, torch.Tensor]:
        return {"steps": coded["steps"][lo:hi], "scales": coded["scales"][lo // self.block : -(-hi // self.block)]}
