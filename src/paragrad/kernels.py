"""The exchange's two passes over memory: a small C library where it was built, torch where it was not."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from paragrad.types import Vector

LARGE = 16_384
"""Elements from which a call into the library pays for itself."""


def _load() -> ctypes.CDLL | None:
    for path in Path(__file__).parent.glob("_kernels*.so"):
        library = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.paragrad_add.argtypes = (pointer, pointer, pointer, pointer, pointer, ctypes.c_float, size)
        library.paragrad_add.restype = ctypes.c_int
        library.paragrad_subtract.argtypes = (pointer, pointer, pointer, size)
        library.paragrad_subtract.restype = None
        return library
    return None


_library = _load()


def compiled() -> bool:
    """Whether the C library is there."""
    return _library is not None


def add(out: Vector, now: Vector, x: Vector, scale: float = 1.0, copies: Sequence[Vector] = ()) -> bool:
    """``out = now + scale * x``, and at most two copies of it, in one pass; returns whether the result is finite throughout."""
    if _library is not None and _fits(out, now, x, *copies):
        twin, home = (*(copy.data_ptr() for copy in copies), None, None)[:2]
        return bool(_library.paragrad_add(out.data_ptr(), twin, home, now.data_ptr(), x.data_ptr(), scale, x.numel()))
    torch.add(now, x, alpha=scale, out=out)
    for copy in copies:
        copy.copy_(out)
    return finite(out)


def subtract(out: Vector, a: Vector, b: Vector) -> Vector:
    """``out = a - b`` in one pass."""
    if _library is not None and _fits(out, a, b):
        _library.paragrad_subtract(out.data_ptr(), a.data_ptr(), b.data_ptr(), out.numel())
        return out
    return torch.sub(a, b, out=out)


def finite(vector: Vector) -> bool:
    """Whether all elements are finite: one sum, and a closer look only where it overflows."""
    if not vector.is_floating_point() or bool(torch.isfinite(vector.sum())):
        return True
    return bool(torch.isfinite(vector).all())


def _fits(*vectors: Vector) -> bool:
    length = vectors[0].numel()
    return length >= LARGE and all(
        v.dtype == torch.float32 and v.is_contiguous() and v.numel() == length and v.device.type == "cpu" for v in vectors
    )
