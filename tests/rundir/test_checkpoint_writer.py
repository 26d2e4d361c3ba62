"""The writer of checkpoints: beside the training, one at a time, and what became of each."""

from __future__ import annotations

import os

import torch

from paragrad.rundir import checkpoint
from paragrad.rundir.checkpoint_writer import CheckpointWriter, Written

NUMBERS = {"clock": 3, "center": {}, "tally": {}}


def write(folder, fd: int) -> Written | None:
    writer = CheckpointWriter(folder)
    writer.write(Written(3, 9, [1]), {"value": torch.ones(2)}, dict(NUMBERS), fd)
    assert writer.writing == 3
    written = writer.finish()
    assert writer.finish() is None, "what became of it is told once"
    return written


def test_a_checkpoint_is_written_with_its_record_on_the_disk(tmp_path):
    with (tmp_path / "record.jsonl").open("wb") as record:
        written = write(tmp_path / "checkpoints", record.fileno())
    assert (written.error, written.sync_error, written.without) == (None, None, [1])
    assert torch.equal(checkpoint.load(tmp_path / "checkpoints" / "0000000003").tensors["value"], torch.ones(2))


def test_what_cannot_be_written_is_told_and_costs_nothing_else(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    closed = os.open(tmp_path / "record.jsonl", os.O_CREAT | os.O_WRONLY)
    os.close(closed)
    written = write(tmp_path / "checkpoints", closed)
    assert "Error" in (written.error or "")
    assert isinstance(written.sync_error, OSError)
