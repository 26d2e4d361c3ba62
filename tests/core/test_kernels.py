"""The C kernels do what torch does, at any length and alignment, and see what is not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paragrad.core import kernels

LONG = 16_384
"""From here on the library writes past the cache."""
LENGTHS = st.one_of(
    st.integers(1, 50), st.sampled_from([LONG - 1, LONG, LONG + 3, kernels.SHARED + 7, kernels.SHARED * 2 + 33])
)


def vectors(count: int, length: int, offset: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(length + offset, generator=generator)[offset:] for _ in range(count)]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    kernels.use_threads(request.param)
    yield
    kernels.use_threads(1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("offset", [0, 1])
@settings(deadline=None, max_examples=15)
@given(length=LENGTHS)
def test_each_pass_is_its_equation(length, offset):
    now, x, anchor, local = vectors(4, length, offset)
    out, twin, force = (torch.empty_like(now) for _ in range(3))
    assert kernels.add(out, now, x, 0.3, twin)
    assert torch.allclose(out, now + 0.3 * x, atol=1e-6)
    assert torch.equal(out, twin)
    assert kernels.approach(out, force, now, x, 0.25)
    assert torch.allclose(force, 0.25 * (x - now), atol=1e-6)
    assert torch.allclose(out, now + force, atol=1e-6)
    assert kernels.blend(out, now, 0.5, x, -2.0)
    assert torch.allclose(out, 0.5 * now - 2.0 * x, atol=1e-6)
    assert torch.equal(kernels.subtract(out, now, x), now - x)
    expected = now + 0.1 * (local - anchor)
    assert kernels.move(out, anchor, local, now, 0.1)
    assert torch.allclose(out, expected, atol=1e-6)
    assert torch.equal(out, anchor)
    assert torch.equal(out, local)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None, max_examples=15)
@given(length=LENGTHS, scales=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=3))
def test_a_mover_is_a_move_each_time_and_sees_what_is_not_finite(length, dtype, scales):
    mine = [vector.to(dtype) for vector in vectors(4, length)]
    plain = [vector.clone() for vector in mine]
    go = kernels.mover(*mine)
    for scale in scales:
        for those in (mine, plain):
            those[2].add_(1.0)
        assert go(scale)
        assert kernels.move(*plain, scale)
        assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
    mine[2][-1] = float("nan")
    assert not go(1.0)


def test_a_mover_keeps_its_vectors_alive():
    go = kernels.mover(*(torch.ones(3) for _ in range(4)))
    _ = [torch.full((3,), float("nan")) for _ in range(100)]
    assert go(1.0)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 5, -1])
def test_what_is_not_finite_is_seen(bad, where):
    for length in (40, LONG + 3, kernels.SHARED + 7):
        now, x, anchor = vectors(3, length)
        x[where] = bad
        out, force = torch.empty_like(now), torch.empty_like(now)
        assert not kernels.add(out, now, x)
        assert not kernels.approach(out, force, now, x, 0.5)
        assert not kernels.blend(out, now, 0.5, x, 0.5)
        assert not kernels.finite(x)
        assert not kernels.move(out, anchor, x.clone(), now, 0.5)


def test_a_large_sum_of_finite_numbers_is_finite_and_an_overflow_is_not():
    huge = torch.full((LONG,), 3e38)
    assert kernels.finite(huge)
    assert not kernels.add(torch.empty_like(huge), huge, huge)


def test_without_the_library_torch_does_the_same(monkeypatch):
    now, anchor, local = vectors(3, LONG)
    with_library, without = torch.empty_like(now), torch.empty_like(now)
    kernels.move(with_library, anchor.clone(), local.clone(), now, 0.1)
    monkeypatch.setattr(kernels, "_library", None)
    assert not kernels.compiled()
    assert kernels.move(without, anchor, local, now, 0.1)
    assert torch.allclose(with_library, without, atol=1e-6)
    assert torch.equal(without, local)


def test_float64_is_left_to_torch():
    now, x = (v.double() for v in vectors(2, LONG))
    out = torch.empty_like(now)
    assert kernels.add(out, now, x, 0.3)
    assert torch.allclose(out, now + 0.3 * x, atol=1e-15)
