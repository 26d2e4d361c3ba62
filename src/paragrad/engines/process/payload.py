"""A job as sent to other processes: pickled by value, with its large arrays stored once for all of them."""

from __future__ import annotations

import importlib
import io
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import cloudpickle
import numpy as np
import torch

from paragrad.engines.process.forkserver import Fd
from paragrad.engines.process.segment import PAGE, reserve

LARGE = 65_536
"""Bytes from which an array is stored separately, and mapped instead of copied into each process."""


class Stored(Protocol):
    """Stored blocks of bytes that a process can open. Must be picklable."""

    def open(self) -> Sequence[Any]:
        """Return the blocks as buffers; writes to them are private to this process."""


class Storage(Protocol):
    """Stores the blocks of a payload: in memory, in a file, or in a cluster's object store."""

    def put(self, blocks: Sequence[memoryview]) -> Stored:
        """Store blocks of bytes."""

    def close(self) -> None:
        """Release the storage: no further process opens it."""


@dataclass(frozen=True)
class Payload:
    """A stored object that other processes can open."""

    stored: Stored

    def open(self) -> Any:
        """Return the object. Its large arrays are mapped copy-on-write, so that no process can change those of another."""
        pickled, *buffers = self.stored.open()
        return cloudpickle.loads(bytes(pickled), buffers=buffers)


def pack(thing: Any, storage: Storage) -> Payload:
    """Pickle an object into storage."""
    buffers: list[pickle.PickleBuffer] = []

    def apart(buffer: pickle.PickleBuffer) -> bool:
        """Return False for a buffer that is stored separately, as pickle expects."""
        if buffer.raw().nbytes < LARGE:
            return True
        buffers.append(buffer)
        return False

    stream = io.BytesIO()
    pickler = _Pickler(stream, buffer_callback=apart)
    pickler.dump(thing)
    return Payload(storage.put([memoryview(stream.getvalue()), *(buffer.raw() for buffer in buffers)]))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Stores large tensors like NumPy arrays: in buffers outside the pickled bytes."""

    def __init__(self, stream: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], bool]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffer_callback)
        self._shared: dict[int, _Bytes] = {}

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is torch.Tensor and _is_plain(thing):
            return self._reduce_tensor(thing)
        if type(thing) is np.ndarray and not (thing.flags.forc or thing.dtype.hasobject) and thing.nbytes >= LARGE:
            return np.ascontiguousarray(thing).__reduce_ex__(5)  # NumPy would copy this one into the pickled bytes
        if isinstance(thing, ModuleType) and type(thing) is not ModuleType and sys.modules.get(thing.__name__) is thing:
            # torch.classes and torch.ops are of types that cloudpickle does not know. A function that uses torch and any
            # attribute of such a name refers to them.
            return importlib.import_module, (thing.__name__,)
        return super().reducer_override(thing)

    def _reduce_tensor(self, tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        storage = tensor.untyped_storage()
        if storage.nbytes() > 2 * tensor.numel() * tensor.element_size():
            tensor = tensor.contiguous().clone()
            storage = tensor.untyped_storage()
        # Views of one storage share one object, which pickle stores once.
        shared = self._shared.setdefault(storage.data_ptr(), _Bytes.of(storage))
        return _open_tensor, (shared, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() * tensor.element_size() >= LARGE
    )


@dataclass(frozen=True)
class _Bytes:
    array: np.ndarray[Any, np.dtype[np.uint8]]

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> _Bytes:
        return cls(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).numpy())  # type: ignore[call-overload]


def _open_tensor(
    shared: _Bytes, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], first: int
) -> torch.Tensor:
    usable = shared.array.nbytes - shared.array.nbytes % dtype.itemsize
    return torch.from_numpy(shared.array[:usable]).view(dtype).as_strided(size, stride, first)


# -- storage ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mapped:
    """Blocks in a memfd or in a file, each at an offset and of a length."""

    where: Fd | Path
    places: tuple[tuple[int, int], ...]

    def open(self) -> Sequence[Any]:
        fd = self.where.open() if isinstance(self.where, Fd) else os.open(self.where, os.O_RDONLY | os.O_CLOEXEC)
        private = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        try:
            return [mmap.mmap(fd, size, offset=start, **private) for start, size in self.places]
        finally:
            if isinstance(self.where, Path):
                os.close(fd)


def _write(where: Fd | Path, fd: int, blocks: Sequence[memoryview]) -> _Mapped:
    places, end = [], 0
    for block in blocks:
        size = max(1, block.nbytes)
        reserve(fd, end, size)
        with mmap.mmap(fd, size, offset=end) as room:
            room[: block.nbytes] = block.cast("B")
        places.append((end, size))
        end += -(-size // PAGE) * PAGE
    return _Mapped(where, tuple(places))


class Memfd:
    """Anonymous memory, for children of this process."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("paragrad-job", os.MFD_CLOEXEC)

    def put(self, blocks: Sequence[memoryview]) -> Stored:
        return _write(Fd(self._fd), self._fd, blocks)

    def close(self) -> None:
        os.close(self._fd)


class File:
    """A file that only its owner can read, for processes with the same file system."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, blocks: Sequence[memoryview]) -> Stored:
        self._path.unlink(missing_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            return _write(self._path, fd, blocks)
        finally:
            os.close(fd)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _AsBytes:
    blocks: tuple[bytes, ...]

    def open(self) -> Sequence[Any]:
        return [bytearray(block) for block in self.blocks]


class Bytes:
    """Plain bytes that are sent with the task, for processes on any machine."""

    def put(self, blocks: Sequence[memoryview]) -> Stored:
        return _AsBytes(tuple(bytes(block) for block in blocks))

    def close(self) -> None:
        """Do nothing: there is no storage to release."""
