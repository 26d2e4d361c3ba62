"""What learners whose tensors are views of three vectors have in common."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

from paragrad.core.flat import Flat, Piece
from paragrad.types import Vector

Place: TypeAlias = tuple[str, int, int, list[int], str]
"""The vector of a checkpoint, the first and the last element, the shape and the type of a tensor."""


class Flattened:
    """A model's trained tensors, its floating state that is not trained, and its counters: each as one vector."""

    def __init__(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        buffers: Iterable[tuple[str, torch.Tensor]],
        integers: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        self._weights = Flat(weights)
        self._buffers = Flat(buffers, kind="buffer")
        self._integers = Flat(integers, kind="buffer")
        self.report: Callable[[str], None] = warnings.warn
        """Told what went wrong in a validation that went on."""

    @property
    def weights(self) -> Vector:
        """All trained parameters."""
        return self._weights.vector

    @property
    def buffers(self) -> Vector:
        """Batch-norm statistics and the like."""
        return self._buffers.vector

    @property
    def integers(self) -> Vector:
        """Counters."""
        return self._integers.vector

    @property
    def coarse(self) -> bool:
        """Whether the model holds weights in a coarser type than the vector."""
        return self._weights.coarse

    @property
    def pieces(self) -> dict[str, list[Piece]]:
        """Where each tensor of the model lies in weights, buffers and integers."""
        kinds = {"weights": self._weights, "buffers": self._buffers, "integers": self._integers}
        return {kind: flat.pieces for kind, flat in kinds.items()}

    @property
    def layout(self) -> dict[str, Place]:
        """Where each tensor lies in the vectors of a checkpoint, by name."""
        files = {"weights": "value", "buffers": "buffers", "integers": "integers"}
        return {piece.name: _place(files[kind], piece) for kind, pieces in self.pieces.items() for piece in pieces}

    def spread(self) -> bool:
        """Bring the model up to date with the vectors."""
        self._buffers.spread()
        self._integers.spread()
        return self._weights.spread()

    def collect(self) -> None:
        """Bring the vectors up to date with the model."""
        self._weights.collect()
        self._buffers.collect()
        self._integers.collect()

    def gradient_norm(self) -> float:
        """Return the length of the last step's gradient, as the optimiser saw it; NaN where there is none."""
        gradients = [piece.tensor.grad for piece in self._weights.pieces if piece.tensor.grad is not None]
        if not gradients:
            return math.nan
        wide = (torch.promote_types(gradient.dtype, torch.float32) for gradient in gradients)
        norms = (torch.linalg.vector_norm(g, dtype=dtype) for g, dtype in zip(gradients, wide, strict=True))
        return math.hypot(*map(float, norms))

    @property
    def aliasable(self) -> bool:
        """Whether the parameters can be views of a vector that is given."""
        return self._weights.movable

    def check_all(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise where one of these, or a buffer, no longer lies in its vector."""
        self._weights.check(weights)
        self._buffers.check()
        self._integers.check()


def _place(vector: str, piece: Piece) -> Place:
    return vector, piece.lo, piece.hi, list(piece.tensor.shape), str(piece.tensor.dtype).removeprefix("torch.")
