"""FP16 and BF16: every element in two bytes instead of four."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from paragrad.codecs.codec import Codec, Piece, pieces
from paragrad.types import Vector


@dataclass(frozen=True)
class _Half(Codec):
    dtype: ClassVar[torch.dtype]
    unit = 1

    def layout(self, length: int) -> dict[str, Piece]:
        return {"values": Piece(self.dtype, length)}

    def pack(self, vector: Vector) -> dict[str, torch.Tensor]:
        largest = torch.finfo(self.dtype).max
        values = torch.empty(vector.numel(), dtype=self.dtype, device=vector.device)
        for here in pieces(vector):
            values[here] = vector[here].clamp(-largest, largest)
        return {"values": values}

    def unpack(self, coded: Mapping[str, torch.Tensor], out: Vector) -> None:
        out.copy_(coded["values"])

    def cut(self, coded: Mapping[str, torch.Tensor], lo: int, hi: int) -> dict[str, torch.Tensor]:
        return {"values": coded["values"][lo:hi]}


@dataclass(frozen=True)
class FP16(_Half):
    """v as a float of 16 bits, 11 of them digits.

    Half of the bytes. Values beyond ±65504 or below 6e-8 are cut off, and the rest is sent with the next commits.

    Choose it first: its error is hardly ever noticeable.
    Not if communication limits the run: int8 needs half as many bytes, topk one twenty-fifth.
    """

    dtype = torch.float16


@dataclass(frozen=True)
class BF16(_Half):
    """v as a float of 16 bits, 8 of them digits: the range of float32.

    Half of the bytes, as FP16. It has three binary digits less, but no value is too large or too small.

    Choose it instead of fp16 if gradients are very large or very small.
    Not if precision matters more than range: take fp16.
    """

    dtype = torch.bfloat16
