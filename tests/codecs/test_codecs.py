"""Each codec by itself: its equation on a few numbers, its size, what it does to bad ones, and what it refuses to decode."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import paragrad as pg
from paragrad import codecs
from paragrad.codecs.codec import size
from paragrad.config.options import describe, parse
from tests.codecs.table import TABLE

every_codec = pytest.mark.parametrize("codec", TABLE, ids=repr)
quickly = settings(max_examples=30, derandomize=True, deadline=None, database=None)


def through(codec: pg.Codec, vector: torch.Tensor) -> torch.Tensor:
    """What the center would decode, into a vector that held something else before."""
    return codec.decode(codec.encode(vector), torch.full_like(vector, 123.0))


def vectors(largest: float = 1e4) -> st.SearchStrategy[torch.Tensor]:
    """Of any length, in float32 or float64; with zeros, equals, and very small ones."""
    elements = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.02, -0.02, 1e-30]), st.floats(-largest, largest, allow_nan=False, width=32)
    )
    found = st.sampled_from(["float32", "float64"]).flatmap(
        lambda dtype: arrays.arrays(dtype, st.integers(0, 40), elements=elements)
    )
    return found.map(torch.from_numpy)


# -- equations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "vector", "decoded"),
    [
        (pg.FP16(), [1.0, 1 + 2**-11, 1e5, -1e9, 1e-9], [1.0, 1.0, 65504.0, -65504.0, 0.0]),
        (pg.BF16(), [1.0, 1 + 2**-9, 2.0**100, -3.4e38], [1.0, 1.0, 2.0**100, -(2.0**128) + 2.0**120]),
        (pg.Int8(block=2), [127.0, 64.4, -254.0, 3.1, 0.0], [127.0, 64.0, -254.0, 4.0, 0.0]),
        (pg.OneBit(block=4), [1.0, 3.0, -1.0, 0.0, -8.0], [2.0, 2.0, -0.5, -0.5, -8.0]),
        (pg.Threshold(0.5), [0.5, -0.4, -7.0, 0.0], [0.5, 0.0, -7.0, 0.0]),
        (pg.Threshold(0.5, values=False), [0.5, -0.4, -7.0, 3.0], [0.5, 0.0, -0.5, 0.5]),
        (pg.TopK(0.5), [1.0, -3.0, 2.0, 0.0], [0.0, -3.0, 2.0, 0.0]),
        (pg.TopK(0.5), [1.0, -1.0, 1.0, 1.0], [1.0, -1.0, 0.0, 0.0]),
        (pg.TopK(0.01), [1.0, -3.0, 2.0], [0.0, -3.0, 0.0]),
    ],
    ids=repr,
)
def test_a_few_numbers_by_hand(codec, vector, decoded):
    assert through(codec, torch.tensor(vector)).tolist() == decoded


@pytest.mark.parametrize(
    ("codec", "times"),
    [(pg.FP16(), 2), (pg.BF16(), 2), (pg.Int8(), 3.99), (pg.OneBit(), 31), (pg.TopK(0.01), 50), (pg.TopK(0.001), 500)],
    ids=repr,
)
def test_a_large_vector_becomes_so_many_times_shorter(codec, times):
    vector = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    assert 4_000_000 / size(codec.encode(vector)) >= times


# -- laws -----------------------------------------------------------------------------------------------------------


@every_codec
@quickly
@given(vector=vectors())
def test_what_is_coded_is_as_the_layout_says_and_within_its_limit(codec, vector):
    coded = codec.encode(vector)
    layout = codec.layout(vector.numel())
    assert set(coded) == set(layout)
    for name, tensor in coded.items():
        assert (tensor.dtype, tensor.device.type, tensor.ndim) == (layout[name].dtype, "cpu", 1)
        assert tensor.is_contiguous()
    assert size(coded) <= codec.limit(vector.numel())


@every_codec
@quickly
@given(vector=vectors())
def test_what_is_left_is_no_longer_than_what_was_there_and_what_is_coded_stays_as_it_is(codec, vector):
    before = vector.clone()
    decoded = through(codec, vector)
    assert torch.equal(vector, before)
    rest = torch.linalg.vector_norm((vector - decoded).double())
    assert rest <= torch.linalg.vector_norm(vector.double()) * (1 + 1e-6) + 1e-30
    again = codec.encode(vector)
    assert all(torch.equal(tensor, again[name]) for name, tensor in codec.encode(vector).items())


@every_codec
@quickly
@given(vector=vectors(2.0**127))
def test_a_finite_vector_decodes_to_a_finite_one_however_large(codec, vector):
    decoded = through(codec, vector)
    assert bool(torch.isfinite(decoded).all())
    assert bool(torch.isfinite(vector - decoded).all())


def test_float64_beyond_the_range_of_float32_is_cut_off_there():
    vector = torch.tensor([1e300, -1e300, 1.0], dtype=torch.float64)
    for codec in TABLE:
        assert bool(torch.isfinite(through(codec, vector)).all()), codec


@every_codec
@quickly
@given(vector=vectors().filter(len), bad=st.sampled_from([math.nan, math.inf, -math.inf]), data=st.data())
def test_a_vector_that_is_not_finite_decodes_to_one_that_is_not(codec, vector, bad, data):
    vector[data.draw(st.integers(0, len(vector) - 1))] = bad
    assert not bool(torch.isfinite(through(codec, vector)).all())


@quickly
@given(vector=vectors(), share=st.floats(0.01, 1.0))
def test_topk_sends_the_largest_whatever_their_order(vector, share):
    codec = pg.TopK(share)
    coded = codec.encode(vector)
    count = codec.count(len(vector))
    assert torch.equal(coded["values"].abs().sort().values, vector.abs().float().sort().values[len(vector) - count :])
    assert torch.equal(coded["values"], vector[coded["positions"].long()].float())


@every_codec
@quickly
@given(vector=vectors().filter(len), data=st.data())
def test_what_is_cut_of_a_coded_vector_decodes_to_that_slice_and_no_byte_is_sent_twice(codec, vector, data):
    coded, whole = codec.encode(vector), through(codec, vector)
    inner = data.draw(st.lists(st.integers(0, len(vector) // codec.unit).map(lambda k: k * codec.unit), max_size=3))
    cuts = [0, *sorted(inner), len(vector)]
    slices = [codec.cut(coded, lo, hi) for lo, hi in pairwise(cuts)]
    for (lo, hi), mine in zip(pairwise(cuts), slices, strict=True):
        decoded = codec.of_slices.decode(mine, torch.full((hi - lo,), 123.0, dtype=vector.dtype))
        assert torch.equal(decoded, whole[lo:hi])
    besides = size({"step": coded["step"]}) * (len(slices) - 1) if "step" in coded else 0
    assert sum(map(size, slices)) == size(coded) + besides


# -- what may come from a network -----------------------------------------------------------------------------------

N = 40


def good(codec: pg.Codec) -> dict[str, torch.Tensor]:
    return codec.encode(torch.linspace(-1, 1, N))


@every_codec
def test_tensors_that_no_vector_becomes_are_refused(codec):
    coded, out = good(codec), torch.zeros(N)
    name = next(iter(coded))
    wrong = [
        {},
        coded | {"more": coded[name]},
        {key: tensor for key, tensor in coded.items() if key != name},
        coded | {name: coded[name].to(torch.float64)},
        coded | {name: coded[name].view(1, -1)},
        coded | {name: torch.cat([coded[name]] * (N + 1))},
    ]
    for malformed in wrong:
        with pytest.raises(pg.UsageError, match=f"coded by {codec.name} is malformed"):
            codec.decode(malformed, out)


@pytest.mark.parametrize("codec", [pg.TopK(0.05), pg.Threshold(0.1), pg.Threshold(0.1, values=False)], ids=repr)
@pytest.mark.parametrize(
    ("where", "said"), [([0, N], f"position {N}"), ([3, 3], "increasing order"), ([3, 2], "increasing order"), ([-1, 3], "")]
)
def test_positions_that_are_not_in_the_vector_are_refused(codec, where, said):
    values = {"step": torch.ones(1)} if codec == pg.Threshold(0.1, values=False) else {"values": torch.ones(2)}
    if "step" in values:
        where = [where[0], ~where[1]]  # the sign of the second is another
        if where[0] < 0:
            where[0] = ~N
    with pytest.raises(pg.UsageError, match=said or "position -1|increasing order"):
        codec.decode({"positions": torch.tensor(where, dtype=torch.int32), **values}, torch.zeros(N))


def test_as_many_values_as_positions():
    codec = pg.Threshold(0.1)
    coded = good(codec)
    with pytest.raises(pg.UsageError, match="positions, but"):
        codec.decode(coded | {"values": coded["values"][1:]}, torch.zeros(N))


@every_codec
@quickly
@given(data=st.data())
def test_random_tensors_of_the_right_kind_decode_or_are_refused_and_nothing_else(codec, data):
    coded = {}
    for name, piece in codec.layout(N).items():
        length = piece.length if piece.exact else data.draw(st.integers(0, piece.length))
        raw = data.draw(st.binary(min_size=length * piece.dtype.itemsize, max_size=length * piece.dtype.itemsize))
        coded[name] = torch.frombuffer(bytearray(raw), dtype=piece.dtype) if raw else torch.empty(0, dtype=piece.dtype)
    out = torch.full((N,), 123.0)
    try:
        codec.decode(coded, out)
    except pg.UsageError:
        assert out.tolist() == [123.0] * N


# -- names and fields -----------------------------------------------------------------------------------------------


@every_codec
def test_a_codec_is_spelled_as_text_and_read_back(codec):
    assert parse(describe(codec), "codec", codecs) == codec


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pg.TopK(0.0), "share=0.0"),
        (lambda: pg.TopK(1.5), "share=1.5"),
        (lambda: pg.Int8(block=0), "block=0"),
        (lambda: pg.OneBit(block=-1), "block=-1"),
        (lambda: pg.Threshold(0.0), "threshold=0.0"),
        (lambda: pg.Threshold(math.nan), "threshold=nan"),
    ],
)
def test_fields_that_cannot_be_are_refused(make, said):
    with pytest.raises(pg.UsageError, match=said):
        make()


def test_every_codec_is_a_public_name_and_says_when_to_choose_it():
    for name in codecs.names():
        codec = codecs.load(name)
        assert getattr(pg, name) is codec
        assert issubclass(codec, pg.Codec)
        assert "Choose it " in (codec.__doc__ or "")
        assert "\n    Not " in (codec.__doc__ or "")
