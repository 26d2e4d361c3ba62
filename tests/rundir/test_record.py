"""The record: what is written is what is read, a line for each event."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paragrad.rundir.record import Record, plain, read, validations
from paragrad.types import Event


@pytest.mark.parametrize("text", ['},{"event":"x"', "},{'event':", 'a "quoted" \\ text\n of two lines', "ä"])
def test_an_event_is_a_line_whatever_it_says(tmp_path, text):
    record = Record(tmp_path / "record.jsonl")
    events = [
        Event("note", 0.5, {"message": text}),
        Event("resume", 1.0, {"waiting": [{"worker": 0}, {"worker": 1}], "path": None}),
    ]
    for event in events * 2:
        record.write(event)
    record.close()
    assert list(read(tmp_path)) == events * 2
    assert len((tmp_path / "record.jsonl").read_text().splitlines()) == 4


def test_a_figure_that_is_not_finite_is_null_on_disk_and_nan_when_read(tmp_path):
    figures = {"clock": 3, "seconds": 1.0, "loss": math.inf, "mine": math.nan, "accuracy": 0.5}
    record = Record(tmp_path / "record.jsonl")
    record.write(Event("note", 0.5, {"message": "before"}))
    record.write(Event("validation", 1.0, figures))
    record.close()
    lines = (tmp_path / "record.jsonl").read_text().splitlines()
    strict = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert strict[1] == {"event": "validation", "time": 1.0, **figures, "loss": None, "mine": None}
    [look] = validations(read(tmp_path))
    assert math.isnan(look.data["loss"])
    assert math.isnan(look.data["mine"])
    assert look.data["accuracy"] == 0.5


@given(
    st.recursive(
        st.floats() | st.integers() | st.text() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_whatever_is_measured_is_written_as_strict_json(value):
    json.loads(json.dumps(plain(value), allow_nan=False), parse_constant=pytest.fail)
