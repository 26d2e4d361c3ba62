"""Anonymous shared memory: tensors in a memfd, which is freed with its last user and cannot leak into /dev/shm."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from paragrad.errors import UsageError

PAGE = 4096

Layout: TypeAlias = dict[str, tuple[int, int, torch.dtype]]
"""Offset, length and type of every tensor in a segment."""


class Segment:
    """Named tensors in one memfd; another process opens them with ``fd`` and ``layout``."""

    def __init__(self, fd: int | None = None, layout: Layout | None = None) -> None:
        self.fd = os.memfd_create("paragrad", os.MFD_CLOEXEC) if fd is None else fd
        self.layout = dict(layout or {})
        ends = (offset + _pages(length * dtype.itemsize) for offset, length, dtype in self.layout.values())
        self._end = max(ends, default=0)
        self._open: dict[str, torch.Tensor] = {}

    def allocate(self, name: str, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor of zeros that all processes with this segment share."""
        assert name not in self.layout
        size = length * dtype.itemsize
        if size:
            reserve(self.fd, self._end, size)
        self.layout[name] = (self._end, length, dtype)
        self._end += _pages(size)
        return self.tensor(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of that name."""
        if name not in self._open:
            offset, length, dtype = self.layout[name]
            if length == 0:
                self._open[name] = torch.empty(0, dtype=dtype)
            else:
                memory = mmap.mmap(self.fd, length * dtype.itemsize, offset=offset)
                self._open[name] = torch.frombuffer(memory, dtype=dtype, count=length)
        return self._open[name]

    def close(self) -> None:
        """Close the descriptor; tensors in use keep their memory."""
        self._open.clear()
        os.close(self.fd)


def plain_layout(layout: Layout) -> dict[str, list[Any]]:
    """Return a layout in types that JSON has."""
    return {name: [offset, length, str(dtype).removeprefix("torch.")] for name, (offset, length, dtype) in layout.items()}


def layout_from(plain: Mapping[str, Sequence[Any]]) -> Layout:
    """Return the layout that ``plain_layout`` returned."""
    return {name: (offset, length, getattr(torch, dtype)) for name, (offset, length, dtype) in plain.items()}


def reserve(fd: int, offset: int, size: int) -> None:
    """Reserve the memory now; otherwise a process without enough memory gets SIGBUS at first use."""
    try:
        os.posix_fallocate(fd, offset, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise UsageError(
                f"Not enough memory to share {size / 2**20:,.0f} MiB between processes. Use fewer workers, a smaller model or "
                "more memory."
            ) from error
        raise


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
