"""Shared memory without a name: tensors in a memfd, which dies with its last holder and cannot leak into /dev/shm."""

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
"""Of every tensor in a segment: where it begins, its length, its type."""


class Segment:
    """Named tensors in one memfd; another process opens the same from ``fd`` and ``layout``."""

    def __init__(self, fd: int | None = None, layout: Layout | None = None) -> None:
        self.fd = os.memfd_create("paragrad", os.MFD_CLOEXEC) if fd is None else fd
        self.layout = dict(layout or {})
        self._end = max((offset + _pages(length * _size(dtype)) for offset, length, dtype in self.layout.values()), default=0)
        self._open: dict[str, torch.Tensor] = {}

    def allocate(self, name: str, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of zeros, visible to everyone who has the segment."""
        assert name not in self.layout
        size = length * _size(dtype)
        if size:
            reserve(self.fd, self._end, size)
        self.layout[name] = (self._end, length, dtype)
        self._end += _pages(size)
        return self.tensor(name)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name."""
        if name not in self._open:
            offset, length, dtype = self.layout[name]
            if length == 0:
                self._open[name] = torch.empty(0, dtype=dtype)
            else:
                memory = mmap.mmap(self.fd, length * _size(dtype), offset=offset)
                self._open[name] = torch.frombuffer(memory, dtype=dtype, count=length)
        return self._open[name]

    def close(self) -> None:
        """Let go of the descriptor; tensors in use keep their memory."""
        self._open.clear()
        os.close(self.fd)


def plain_layout(layout: Layout) -> dict[str, list[Any]]:
    """A layout in what JSON has."""
    return {name: [offset, length, str(dtype).removeprefix("torch.")] for name, (offset, length, dtype) in layout.items()}


def layout_from(plain: Mapping[str, Sequence[Any]]) -> Layout:
    """The inverse."""
    return {name: (offset, length, getattr(torch, dtype)) for name, (offset, length, dtype) in plain.items()}


def reserve(fd: int, offset: int, size: int) -> None:
    """Make sure that the memory is there now, instead of a SIGBUS when it is first touched."""
    try:
        os.posix_fallocate(fd, offset, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise UsageError(
                f"There is not enough memory to share {size / 2**20:,.0f} MiB between processes. Use fewer workers, a smaller "
                "model, or more memory."
            ) from error
        raise


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _size(dtype: torch.dtype) -> int:
    return dtype.itemsize
