"""Pieces for the tests of streaming, light to import: their rows are numbers, and they stall, fail or vanish on cue."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn


class Numbered:
    """Pieces of rows that hold their own number; ``hold`` is a piece that is read only once the file ``gate`` is there."""

    def __init__(
        self, lengths: list[int], *, hold: int | None = None, gate: Path | None = None, lost: int | None = None
    ) -> None:
        self.lengths = lengths
        self._starts = np.cumsum([0, *lengths]).tolist()
        self._hold, self._gate, self._lost = hold, gate, lost

    def read(self, piece: int) -> torch.Tensor:
        while piece == self._hold and self._gate is not None and not self._gate.exists():
            time.sleep(0.005)
        if piece == self._lost:
            raise FileNotFoundError(2, "No such file or directory")
        return torch.arange(self._starts[piece], self._starts[piece + 1]).float()[:, None]

    def name(self, piece: int) -> str:
        """As a file is called."""
        return f"part-{piece}.parquet"


class Logged(Numbered):
    """Writes down which process read which piece."""

    def __init__(self, lengths: list[int], log: Path) -> None:
        super().__init__(lengths)
        self._log = log

    def read(self, piece: int) -> torch.Tensor:
        with self._log.open("a") as file:
            file.write(f"{os.getpid()} {piece}\n")
        return super().read(piece)


class Tally(nn.Module):
    """A weight for each row, which grows by 1 whenever the row is trained on with SGD of a rate of the batch's size."""

    def __init__(self, rows: int, sleep: float = 0.0) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(rows))
        self.sleep = sleep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sleep and self.training:
            time.sleep(self.sleep)
        return self.counts[x[:, 0].long() % len(self.counts)]


class Numbers:
    """What makes a generator of rows that are numbered on; ends after ``total`` of them, or goes on for ever."""

    def __init__(self, size: int, total: int | None = None, fail_at: int | None = None) -> None:
        self._size, self._total, self._fail_at = size, total, fail_at

    def __call__(self) -> Iterator[torch.Tensor]:
        first = 0
        while self._total is None or first < self._total:
            if self._fail_at is not None and first >= self._fail_at:
                raise KeyError("the detector is off")
            yield torch.arange(first, first + self._size).float()[:, None]
            first += self._size
