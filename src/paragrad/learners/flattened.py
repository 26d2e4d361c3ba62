"""The common part of learners whose tensors are views of three vectors."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from paragrad.core.flat import Flat
from paragrad.types import Vector

Place: TypeAlias = tuple[str, int, int, list[int], str]
"""Position of a tensor in a checkpoint: the vector, the first and last element, the shape and the type."""


class Flattened:
    """A model's trained tensors, its untrained floating-point state and its counters, each as one vector."""

    _optimizer: Any

    def __init__(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        buffers: Iterable[tuple[str, torch.Tensor]],
        integers: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        self._weights = Flat(weights)
        self._buffers = Flat(buffers, kind="buffer")
        self._integers = Flat(integers, kind="buffer")
        self.pieces = {
            "weights": self._weights.pieces,
            "buffers": self._buffers.pieces,
            "integers": self._integers.pieces,
        }
        """Positions of the model's tensors in weights, buffers and integers."""
        self.coarse = self._weights.coarse
        """True if the model holds weights in a coarser type than the vector."""
        self.report: Callable[[str], None] = warnings.warn
        """Called with errors that do not end a validation."""

    @property
    def weights(self) -> Vector:
        """All trained parameters."""
        return self._weights.vector

    @property
    def buffers(self) -> Vector:
        """Floating-point state that is not trained, such as batch-norm statistics."""
        return self._buffers.vector

    @property
    def integers(self) -> Vector:
        """Counters."""
        return self._integers.vector

    @property
    def aliasable(self) -> bool:
        """True if the parameters can be views of a given vector."""
        return self._weights.movable

    @property
    def layout(self) -> dict[str, Place]:
        """Positions of the tensors in the vectors of a checkpoint, by name."""
        files = {"weights": "value", "buffers": "buffers", "integers": "integers"}
        return {
            p.name: (files[kind], p.lo, p.hi, list(p.tensor.shape), str(p.tensor.dtype).removeprefix("torch."))
            for kind, pieces in self.pieces.items()
            for p in pieces
        }

    def spread(self) -> bool:
        """Copy the vectors to the model."""
        self._buffers.spread()
        self._integers.spread()
        return self._weights.spread()

    def collect(self) -> None:
        """Copy the model's state to the vectors."""
        self._weights.collect()
        self._buffers.collect()
        self._integers.collect()

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore weights, buffers and integers afterwards; call ``collect`` before and at the end."""
        vectors = (self.weights, self.buffers, self.integers)
        before = [vector.clone() for vector in vectors]
        yield
        for vector, old in zip(vectors, before, strict=True):
            vector.copy_(old)
        self.spread()

    def gradient_norm(self) -> float:
        """Return the norm of the last step's gradient as the optimiser received it; NaN if there is none."""
        gradients = [piece.tensor.grad for piece in self._weights.pieces if piece.tensor.grad is not None]
        if not gradients:
            return math.nan
        wide = (torch.promote_types(gradient.dtype, torch.float32) for gradient in gradients)
        norms = (torch.linalg.vector_norm(g, dtype=dtype) for g, dtype in zip(gradients, wide, strict=True))
        return math.hypot(*map(float, norms))

    def check_all(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise if one of these tensors, or a buffer, is no longer a view of its vector."""
        self._weights.check(weights)
        self._buffers.check()
        self._integers.check()

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the local optimiser's state."""
        return {name: tensor.clone() for name, tensor in self._optimizer.state().items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a state that ``state`` returned."""
        self._optimizer.load(state)

    def recover(self) -> None:
        """Reset the optimiser's state after NaN."""
        self._optimizer.forget()
