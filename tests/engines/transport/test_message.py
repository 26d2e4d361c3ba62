"""Heads and declared vectors: what is said is what is heard, and whatever else comes is refused in words."""

from __future__ import annotations

import json
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paragrad.engines.transport.message import DTYPES, HEAD, Malformed, declare, declared, decode, encode, expect, raw

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
HEADS = st.dictionaries(st.text(max_size=8), VALUES, max_size=4)
VECTORS = st.dictionaries(
    st.text(string.ascii_lowercase, min_size=1), st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 50)), max_size=4
)


def made(spec: dict[str, tuple[str, int]]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(length, dtype=DTYPES[dtype]) for name, (dtype, length) in spec.items()}


@given(HEADS)
def test_a_head_is_heard_as_it_was_said(head):
    assert decode(encode(head)) == head


@given(st.binary(max_size=200))
def test_any_bytes_are_a_head_or_malformed(data):
    try:
        assert isinstance(decode(data), dict)
    except Malformed:
        with pytest.raises((ValueError, AssertionError)):
            assert isinstance(json.loads(data), dict)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "no head"),
        (b"[1]", "not a JSON object"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"a":' * 200_000, "not JSON"),
        (b" " * (HEAD + 1), "at most 1,048,576"),
        (b'{"n":' + b"9" * 10_000 + b"}", "not JSON"),
    ],
    ids=["none", "list", "half", "bytes", "deep", "huge", "digits"],
)
def test_what_is_no_head_is_said_to_be_none(data, words):
    with pytest.raises(Malformed, match=words):
        decode(data)


@given(VECTORS)
def test_vectors_are_declared_and_expected_as_they_are(spec):
    vectors = made(spec)
    head = decode(encode({"vectors": declare(vectors)}))
    assert declared(head) == {name: (vector.dtype, vector.numel()) for name, vector in vectors.items()}
    expect(head, vectors)
    assert {name: raw(vector).nbytes for name, vector in vectors.items()} == {
        name: vector.numel() * vector.element_size() for name, vector in vectors.items()
    }


@given(VECTORS, VECTORS)
def test_other_vectors_than_there_is_room_for_are_malformed(said, room):
    vectors, rooms = made(said), made(room)
    head = {"vectors": declare(vectors)}
    if {n: (v.dtype, v.numel()) for n, v in vectors.items()} == {n: (v.dtype, v.numel()) for n, v in rooms.items()}:
        expect(head, rooms)
    else:
        with pytest.raises(Malformed):
            expect(head, rooms)


@given(VALUES)
def test_any_declaration_is_understood_or_malformed(entries):
    try:
        found = declared({"vectors": entries})
    except Malformed:
        return
    assert isinstance(entries, list)
    assert [name for name, *_ in entries] == list(found)


@pytest.mark.parametrize(
    "entries",
    [
        "x",
        {"value": 1},
        [["value", "float32"]],
        [["value", "complex64", 1]],
        [["value", "float32", -1]],
        [["value", "float32", 1.5]],
        [["value", "float32", True]],
        [["value", "float32", 1], ["value", "float32", 1]],
        [[1, "float32", 1]],
        [None],
    ],
    ids=str,
)
def test_a_declaration_that_cannot_be_is_malformed(entries):
    with pytest.raises(Malformed, match="vector"):
        declared({"vectors": entries})


def test_a_vector_of_four_gigabytes_is_refused_by_what_it_is_declared_to_be():
    with pytest.raises(Malformed, match=r"1,073,741,824 values of float32 for 'value', but 10 values of float32 are needed"):
        expect({"vectors": [["value", "float32", 1 << 30]]}, {"value": torch.zeros(10)})


def test_bytes_of_a_vector_are_its_own_memory():
    vector = torch.zeros(3)
    raw(vector)[:4] = bytearray(torch.tensor([1.5]).numpy().tobytes())
    assert vector.tolist() == [1.5, 0.0, 0.0]
