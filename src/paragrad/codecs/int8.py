"""Int8: one byte per element, and one scale per block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paragrad.codecs.codec import BlockCodec, Piece
from paragrad.types import Vector

STEPS = 127
"""Largest code of an element."""


@dataclass(frozen=True)
class Int8(BlockCodec):
    """s = max |v| / 127 over a block;  sent is round(v / s), a whole number from -127 to 127, and s.

    A quarter of the bytes, and 4 bytes per block. Values are rounded to the nearest, not at random. Dettmers, *8-Bit
    Approximations for Parallelism in Deep Learning* (ICLR 2016), arXiv:1511.04561, has several such codes; this one is linear.

    Choose it for a quarter of the bytes at hardly any loss of accuracy.
    Not if the elements of a block differ widely: one large value makes all others of its block coarse. Take a smaller block.
    """

    def layout(self, length: int) -> dict[str, Piece]:
        return {"steps": Piece(torch.int8, length), "scales": Piece(torch.float32, self.count(length))}

    def pack(self, vector: Vector) -> dict[str, torch.Tensor]:
        steps = torch.empty(vector.numel(), dtype=torch.int8, device=vector.device)
        scales = torch.empty(self.count(vector.numel()), dtype=torch.float32, device=vector.device)
        largest = torch.finfo(torch.float32).max
        for here, which in self.blocks(vector):
            rows = vector[here].view(which.stop - which.start, -1)
            scale = (rows.abs().amax(1) / STEPS).clamp(max=largest).float()
            scales[which] = scale
            # A block whose scale is 0 is sent as zeros.
            safe = torch.where(scale > 0, scale, 1.0).to(vector.dtype).unsqueeze(1)
            steps[here] = torch.div(rows, safe).round_().clamp_(-STEPS, STEPS).nan_to_num_().view(-1)
        return {"steps": steps, "scales": scales}

    def unpack(self, coded: Mapping[str, torch.Tensor], out: Vector) -> None:
        scales = coded["scales"].to(out.dtype)
        for here, which in self.blocks(out):
            rows = coded["steps"][here].view(which.stop - which.start, -1)
            torch.mul(rows, scales[which].unsqueeze(1), out=out[here].view(rows.shape))

    def cut(self, coded: Mapping[str, torch.Tensor], lo: int, hi: int) -> dict[str, torch.Tensor]:
        return {"steps": coded["steps"][lo:hi], "scales": coded["scales"][self.blocks_of(lo, hi)]}
