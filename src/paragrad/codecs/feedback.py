"""Error feedback: what a codec has left out of a worker's commits goes into its next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paragrad.codecs.codec import Codec, size
from paragrad.types import Vector


@dataclass(frozen=True, slots=True)
class Coded:
    """A vector as it is sent."""

    value: Vector
    """As the center decodes it."""
    tensors: dict[str, torch.Tensor]
    """As it goes over a wire."""
    bytes: int
    residual: Vector
    """What is left for the next commit once this one counts."""


class Feedback:
    """p = v + e;  sent is C(p);  e <- p - C(p), once the center has taken it.

    The residual e lies in two rows: a commit reads the one and writes the other, and only the answer that it was applied
    turns them. So the row of the last applied commit is whole at whatever instruction a worker is killed; and of a commit that
    was dropped or refused nothing is left: the residual has back what it gave, and the window's rows are done again.
    """

    def __init__(self, codec: Codec, rows: Sequence[Vector]) -> None:
        self.codec = codec
        self._now, self._next = rows

    @classmethod
    def like(cls, codec: Codec, weights: Vector) -> Feedback:
        """With rows of its own."""
        return cls(codec, [torch.zeros_like(weights) for _ in range(2)])

    @property
    def residual(self) -> Vector:
        """What the commits that were applied have left out."""
        return self._now

    def begin(self, residual: Vector | None) -> None:
        """Go on with what the center has for this worker, of an earlier one in its place; None: nothing."""
        if residual is None:
            self._now.zero_()
        elif residual.data_ptr() == self._next.data_ptr():
            self.settle()
        elif residual.data_ptr() != self._now.data_ptr():
            self._now.copy_(residual)

    def encode(self, value: Vector, out: Vector, start: int = 0) -> Coded:
        """What to send of a value, a fragment from ``start`` on; it is decoded into ``out``, where the value may have been."""
        here = slice(start, start + value.numel())
        if value.numel() != self._now.numel():
            self._next.copy_(self._now)
        rest = torch.add(value, self._now[here], out=self._next[here])
        tensors = self.codec.encode(rest)
        self.codec.decode(tensors, out)
        rest.sub_(out)
        return Coded(out, tensors, size(tensors), self._next)

    def settle(self) -> None:
        """The commit was applied."""
        self._now, self._next = self._next, self._now
