"""Error feedback: the part of a commit that a codec leaves out is added to the worker's next commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paragrad.codecs.codec import Codec, size
from paragrad.types import Vector


@dataclass(frozen=True, slots=True)
class Coded:
    """A coded vector."""

    value: Vector
    """Value that the center decodes."""
    tensors: dict[str, torch.Tensor]
    """Tensors that are sent."""
    bytes: int
    residual: Vector
    """Residual for the next commit once this one is applied."""


class Feedback:
    """p = v + e;  sent is C(p);  e <- p - C(p), once the center has applied it.

    The residual e has two rows: a commit reads one and writes the other, and they swap when the center has applied it. So the
    row of the last applied commit is complete whenever a worker is killed. The residual of a dropped or rejected commit is
    discarded, because its rows are trained again.
    """

    def __init__(self, codec: Codec, rows: Sequence[Vector]) -> None:
        self.codec = codec
        self._now, self._next = rows

    @classmethod
    def like(cls, codec: Codec, weights: Vector) -> Feedback:
        """Return a feedback with new rows."""
        return cls(codec, [torch.zeros_like(weights) for _ in range(2)])

    @property
    def residual(self) -> Vector:
        """Sum of what the applied commits left out."""
        return self._now

    def begin(self, residual: Vector | None) -> None:
        """Continue with the residual that the center has for this rank; None: zero."""
        if residual is None:
            self._now.zero_()
        elif residual.data_ptr() == self._next.data_ptr():
            self.settle()
        elif residual.data_ptr() != self._now.data_ptr():
            self._now.copy_(residual)

    def encode(self, value: Vector, out: Vector, start: int = 0) -> Coded:
        """Encode a value (a fragment from ``start`` on) and decode it into ``out``, which may be the memory of the value."""
        here = slice(start, start + value.numel())
        if value.numel() != self._now.numel():
            self._next.copy_(self._now)
        rest = torch.add(value, self._now[here], out=self._next[here])
        tensors = self.codec.encode(rest)
        self.codec.decode(tensors, out)
        rest.sub_(out)
        return Coded(out, tensors, size(tensors), self._next)

    def settle(self) -> None:
        """Swap the rows, because the commit was applied."""
        self._now, self._next = self._next, self._now
