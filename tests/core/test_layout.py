"""Commits and replies in shared memory, on a wire and in the record: what is written is what is read."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paragrad.core.layout import LARGEST, expand, fold
from paragrad.core.state import private
from paragrad.types import COMMIT, REPLY, Commit, Reply

MOST = {"batches": 6, "pulls": 3, "path": 4}
WHOLE = st.integers(0, LARGEST - 1)
WHOLES = st.lists(WHOLE, max_size=6).map(tuple)
POINT = st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False))


@st.composite
def commits(draw: Any) -> Commit:
    return Commit(
        worker=draw(WHOLE),
        sequence=1 + draw(st.integers(0, 1 << 60)),
        version=draw(WHOLE),
        value=torch.empty(0),
        steps=1 + draw(st.integers(0, 1 << 60)),
        incarnation=draw(WHOLE),
        weight=draw(st.floats(-1e299, 1e299)),
        rows=draw(WHOLE),
        batches=draw(WHOLES),
        loss=draw(st.floats()),
        lr=draw(st.floats()),
        seconds=draw(st.floats(0, 1e299)),
        pulls=draw(st.lists(WHOLE, max_size=3).map(tuple)),
        saw=draw(WHOLE),
        gradient_norm=draw(st.floats()),
        distance=draw(st.floats()),
        path=draw(st.none() | st.tuples(POINT, POINT)),
        bytes=draw(st.none() | WHOLE),
        arrived=draw(WHOLE),
    )


def same(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@given(commits())
def test_a_commit_is_the_same_in_memory_and_on_a_wire(commit):
    row = COMMIT.row(private, MOST)
    row.put(COMMIT.arguments(commit))
    header = json.loads(json.dumps(COMMIT.header(commit)))
    for found in (row.get(), COMMIT.read(header, MOST), COMMIT.read(json.loads(json.dumps(COMMIT.header(row))), MOST)):
        again = Commit(value=torch.empty(0), **found)
        for name in (*COMMIT.numbers, *COMMIT.lists):
            assert same(getattr(again, name), getattr(commit, name)), name


@given(commits(), commits())
def test_a_row_holds_nothing_of_what_it_held_before(first, second):
    row, fresh = COMMIT.row(private, MOST), COMMIT.row(private, MOST)
    row.put(COMMIT.arguments(first))
    for one in (row, fresh):
        one.put(COMMIT.arguments(second))
    assert repr(row.get()) == repr(fresh.get())


@given(commits())
def test_the_record_says_all_that_a_replay_needs(commit):
    told = json.loads(json.dumps(COMMIT.record(commit)))
    for name in ("worker", "incarnation", "sequence", "version", "steps", "rows", "seconds", "arrived"):
        assert told[name] == getattr(commit, name)
    assert tuple(expand(told["batches"])) == commit.batches
    assert tuple(told.get("pulls", ())) == commit.pulls
    assert told.get("saw", commit.version) == commit.saw
    assert told.get("bytes") == commit.bytes


def test_every_field_is_a_tensor_or_has_a_kind():
    tensors = {"value", "also", "buffers", "integers", "coded", "residual", "state"}
    for cls, layout in ((Commit, COMMIT), (Reply, REPLY)):
        names = {field.name for field in fields(cls)}
        assert names - tensors == {*layout.numbers, *layout.lists}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("sequence", 0, "a whole number of at least 1"),
        ("sequence", 1 << 62, "a whole number of at least 1"),
        ("steps", 0, "a whole number of at least 1"),
        ("steps", True, "a whole number"),
        ("version", -1, "a whole number of at least 0"),
        ("version", 1.0, "a whole number"),
        ("worker", None, "a whole number"),
        ("rows", "many", "a whole number"),
        ("weight", math.nan, "a finite number"),
        ("weight", math.inf, "a finite number"),
        ("weight", 10**400, "a number"),
        ("seconds", -1.0, "a finite number of at least 0"),
        ("loss", "low", "a number"),
        ("loss", None, "a number"),
        ("lr", [0.1], "a number"),
        ("bytes", -1, "a whole number"),
        ("batches", [0] * 7, "at most 6"),
        ("batches", [-1], "a whole number"),
        ("batches", "012", "not a list"),
        ("pulls", None, "not a list"),
        ("path", [[0.0], [1.0]], "two points of 2 numbers"),
        ("path", [[0.0, 1.0], [1.0]], "two points of 2 numbers"),
        ("path", [[0.0, "x"], [1.0, 2.0]], "a number"),
    ],
)
def test_a_value_that_cannot_be_is_rejected_with_its_name(name, value, said):
    header = COMMIT.header(Commit(0, 1, 0, torch.empty(0), 1, loss=0.0))
    with pytest.raises(ValueError, match=rf"^{name} is .*{said}"):
        COMMIT.read({**header, name: value}, MOST)


@given(st.lists(st.integers(0, 40), max_size=30))
def test_positions_are_the_same_after_they_were_shortened(positions):
    assert expand(json.loads(json.dumps(fold(positions)))) == positions
