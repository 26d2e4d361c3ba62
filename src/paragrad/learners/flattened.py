"""What learners whose tensors are views of three vectors have in common."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paragrad.flat import Flat, Piece
from paragrad.types import Vector


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

    @property
    def aliasable(self) -> bool:
        """Whether the parameters can be views of a vector that is given."""
        return self._weights.movable

    def check_all(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise where one of these, or a buffer, no longer lies in its vector."""
        self._weights.check(weights)
        self._buffers.check()
        self._integers.check()
