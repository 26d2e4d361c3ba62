"""Steps that are launched as one: CUDA graphs of steps whose shapes come again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Graph:
    """One step of so many rows as a CUDA graph: launched as one, with other mini-batches each time."""

    index: torch.Tensor
    graph: Any = field(default=None, init=False)
    out: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)

    def capture(self, step: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Record what a step launches."""
        self.index = self.index.clone()
        self.graph = torch.cuda.CUDAGraph()
        # Garbage that holds memory of the device, collected while a graph is captured, would spoil it; so would a checkpoint
        # that another thread copies from there, but for this mode.
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.out = step(self.index)
        finally:
            gc.enable()

    def replay(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch it on other rows of the data."""
        assert self.out is not None
        self.index.copy_(index)
        self.graph.replay()
        return self.out[0].clone(), self.out[1].clone()
