"""Passes over memory for the exchange: by a small C library if it was built, otherwise by torch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from paragrad.types import Vector

SHARED = 1_048_576
"""Smallest number of elements for which a pass uses a second thread."""

_P, _F, _N = ctypes.c_void_p, ctypes.c_float, ctypes.c_size_t
SIGNATURES = {
    "add": (_P, _P, _P, _P, _F, _N),
    "move": (_P, _P, _P, _P, _F, _N),
    "approach": (_P, _P, _P, _P, _F, _N),
    "blend": (_P, _P, _F, _P, _F, _N),
    "subtract": (_P, _P, _P, _N),
}


def _load() -> ctypes.CDLL | None:
    for path in Path(__file__).parent.glob("_kernels*.so"):
        library = ctypes.CDLL(str(path))
        for name, signature in SIGNATURES.items():
            function = getattr(library, f"paragrad_{name}")
            function.argtypes, function.restype = signature, ctypes.c_int
        return library
    return None


_library = _load()
_passes = {name: getattr(_library, f"paragrad_{name}") for name in SIGNATURES} if _library is not None else {}
_second: ThreadPoolExecutor | None = None


def compiled() -> bool:
    """Return whether the C library was built."""
    return _library is not None


def use_threads(count: int) -> None:
    """Use two threads for large vectors if ``count`` is above 1: one core alone does not saturate the memory bus."""
    global _second
    if _second is not None:
        _second.shutdown()
    _second = ThreadPoolExecutor(1, "paragrad-pass") if count > 1 else None


def add(out: Vector, now: Vector, x: Vector, scale: float = 1.0, twin: Vector | None = None) -> bool:
    """Compute ``out = twin = now + scale * x`` in one pass. Return whether the result is finite."""
    if _fits(out, now, x, *([] if twin is None else [twin])):
        return _call("add", out, twin, now, x, scale)
    torch.add(now, x, alpha=scale, out=out)
    if twin is not None:
        twin.copy_(out)
    return finite(out)


def move(out: Vector, anchor: Vector, local: Vector, now: Vector, scale: float) -> bool:
    """Compute ``out = anchor = local = now + scale * (local - anchor)`` in one pass. Return whether the result is finite."""
    if _fits(out, anchor, local, now):
        return _call("move", out, anchor, local, now, scale)
    torch.add(now, local.sub_(anchor), alpha=scale, out=out)
    anchor.copy_(out)
    local.copy_(out)
    return finite(out)


def mover(out: Vector, anchor: Vector, local: Vector, now: Vector) -> Callable[[float], bool]:
    """Return ``move`` for vectors whose memory does not change: the checks and the addresses are looked up once."""
    vectors = out, anchor, local, now
    if not _fits(*vectors) or out.numel() >= SHARED:
        return partial(move, *vectors)
    function, length = _passes["move"], _N(out.numel())
    a, b, c, d = (_P(vector.data_ptr()) for vector in vectors)

    def go(scale: float, kept: tuple[Vector, ...] = vectors) -> bool:
        return bool(function(a, b, c, d, scale, length))

    return go


def approach(out: Vector, force: Vector, now: Vector, x: Vector, share: float) -> bool:
    """Compute ``force = share * (x - now); out = now + force`` in one pass. Return whether the result is finite."""
    if _fits(out, force, now, x):
        return _call("approach", out, force, now, x, share)
    torch.sub(x, now, out=force).mul_(share)
    torch.add(now, force, out=out)
    return finite(out)


def blend(out: Vector, x: Vector, a: float, y: Vector, b: float) -> bool:
    """Compute ``out = a * x + b * y`` in one pass. Return whether the result is finite."""
    if _fits(out, x, y):
        return _call("blend", out, x, a, y, b)
    torch.add(a * x, y, alpha=b, out=out)
    return finite(out)


def subtract(out: Vector, a: Vector, b: Vector) -> Vector:
    """Compute ``out = a - b`` in one pass and return it."""
    if _fits(out, a, b):
        _call("subtract", out, a, b)
        return out
    return torch.sub(a, b, out=out)


def finite(vector: Vector) -> bool:
    """Return whether all elements are finite. Each element is checked only if their sum is not finite."""
    if not vector.is_floating_point() or math.isfinite(vector.sum().item()):
        return True
    return bool(torch.isfinite(vector).all())


def _fits(*vectors: Vector) -> bool:
    # Called at every commit, so it must cost next to nothing.
    if _library is None:
        return False
    length = vectors[0].numel()
    for vector in vectors:
        if vector.dtype is not torch.float32 or vector.numel() != length or vector.is_cuda or not vector.is_contiguous():
            return False
    return True


def _call(name: str, *arguments: Vector | float | None) -> bool:
    """Run one pass; in two halves at the same time if the vectors are large and there is a second thread."""
    first = arguments[0]
    assert isinstance(first, torch.Tensor)
    length = first.numel()
    if _second is None or length < SHARED:
        return _part(name, arguments, 0, length)
    middle = length // 2 & ~31
    rest = _second.submit(_part, name, arguments, middle, length)
    mine = _part(name, arguments, 0, middle)
    return rest.result() and mine


def _part(name: str, arguments: tuple[Vector | float | None, ...], lo: int, hi: int) -> bool:
    words = [a.data_ptr() + 4 * lo if isinstance(a, torch.Tensor) else a for a in arguments]
    return bool(_passes[name](*words, hi - lo))
