"""Shared memory without a name: tensors in a memfd, which dies with its last holder and cannot leak into /dev/shm."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import torch

from paragrad.errors import UsageError

PAGE = 4096
LARGE = 65_536
"""Bytes from which an array is shared instead of being copied into each process."""


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


# -- objects with large arrays in them ------------------------------------------------------------------------------


class Parcel:
    """One object in a memfd: its large arrays once for all processes, the rest pickled by value."""

    def __init__(self, thing: Any) -> None:
        self.fd = os.memfd_create("paragrad-parcel", os.MFD_CLOEXEC)
        self._end = 0
        self._known: dict[tuple[int, int], int] = {}
        self._kept: list[Any] = []
        pickler = _Pickler(self)
        pickled = pickler.dumps(thing)
        self.start, self.size = self._end, len(pickled)
        self._append(memoryview(pickled))
        self._kept.clear()

    def place(self, owner: Any, data: memoryview, address: int) -> int:
        """Where these bytes lie in the memfd; the same bytes are placed once."""
        key = (address, data.nbytes)
        if key not in self._known:
            self._kept.append(owner)
            self._known[key] = self._end
            self._append(data)
        return self._known[key]

    def _append(self, data: memoryview) -> None:
        if data.nbytes:
            reserve(self.fd, self._end, data.nbytes)
            with mmap.mmap(self.fd, data.nbytes, offset=self._end) as memory:
                memory[:] = data.cast("B")
        self._end += _pages(data.nbytes)

    def close(self) -> None:
        """Let go of the descriptor."""
        os.close(self.fd)


def open_parcel(fd: int, start: int, size: int) -> Any:
    """The object in a parcel; its arrays are mapped copy-on-write, so that nobody can change another's."""
    _Opened.fd = fd
    _Opened.regions = {}
    with mmap.mmap(fd, size, offset=start, prot=mmap.PROT_READ) as memory:
        return cloudpickle.loads(memory[:])


class _Opened:
    fd = -1
    regions: dict[int, mmap.mmap] = {}  # noqa: RUF012


def _region(offset: int, nbytes: int) -> mmap.mmap:
    if offset not in _Opened.regions:
        _Opened.regions[offset] = mmap.mmap(
            _Opened.fd, nbytes, offset=offset, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    return _Opened.regions[offset]


def _open_tensor(
    offset: int, nbytes: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], first: int
) -> torch.Tensor:
    flat = torch.frombuffer(_region(offset, nbytes), dtype=dtype, count=nbytes // _size(dtype))
    return flat.as_strided(size, stride, first)


def _open_array(offset: int, nbytes: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.frombuffer(_region(offset, nbytes), dtype=dtype, count=nbytes // dtype.itemsize).reshape(shape)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, parcel: Parcel) -> None:
        import io

        self._buffer = io.BytesIO()
        super().__init__(self._buffer)
        self._parcel = parcel

    def dumps(self, thing: Any) -> bytes:
        self.dump(thing)
        return self._buffer.getvalue()

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is torch.Tensor and self._shareable(thing):
            return self._reduce_tensor(thing)
        if type(thing) is np.ndarray and thing.nbytes >= LARGE and not thing.dtype.hasobject:
            array = np.ascontiguousarray(thing)
            data = array.reshape(-1).view(np.uint8).data
            where = self._parcel.place(array, data, array.__array_interface__["data"][0])
            return _open_array, (where, array.nbytes, array.dtype, array.shape)
        return super().reducer_override(thing)

    @staticmethod
    def _shareable(tensor: torch.Tensor) -> bool:
        return (
            tensor.layout == torch.strided
            and tensor.device.type == "cpu"
            and not tensor.requires_grad
            and not tensor.is_quantized
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.numel() * tensor.element_size() >= LARGE
        )

    def _reduce_tensor(self, tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        storage = tensor.untyped_storage()
        if storage.nbytes() > 2 * tensor.numel() * tensor.element_size():
            tensor = tensor.contiguous().clone()
            storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]
        where = self._parcel.place(whole, memoryview(whole.numpy()), storage.data_ptr())
        usable = storage.nbytes() - storage.nbytes() % tensor.element_size()
        return _open_tensor, (
            where,
            usable,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
        )


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _size(dtype: torch.dtype) -> int:
    return dtype.itemsize
