"""CUDA graphs of steps whose shapes repeat: all kernels of a step are launched at once."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


class Graph:
    """One step of a fixed number of rows as a CUDA graph, replayed with other mini-batches."""

    def __init__(self, rows: torch.Tensor, step: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._rows = rows.clone()
        self._graph = torch.cuda.CUDAGraph()
        # Garbage collection that frees device memory during a capture would invalidate it. So would a checkpoint that
        # another thread copies from the device, without this mode.
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._out = step(self._rows)
        finally:
            gc.enable()

    def replay(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the step on other rows of the data."""
        self._rows.copy_(rows)
        self._graph.replay()
        return self._out[0].clone(), self._out[1].clone()
