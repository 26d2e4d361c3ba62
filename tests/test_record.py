"""The record: what is written is what is read, a line for each event."""

from __future__ import annotations

import pytest

from paragrad.record import Record, read
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
