"""A run that is killed at a random commit goes on: the same rows, and SyncSGD to the bit."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.core.center import Center
from paragrad.rundir import checkpoint
from paragrad.rundir.record import batches_used, read
from paragrad.schemes.traits import name_of
from tests.conftest import Watch, every_batch_once, train

TOTAL = 50 * 4


class Killed(BaseException):
    """Stands for a power cut: nothing is written after it."""


def cut_at(k: int) -> Watch:
    def cut(watch: Watch, event: pg.Event) -> None:
        raise Killed

    return Watch(at=k, act=cut)


def interrupted_then_resumed(model, rows, out, scheme, at, **options):
    watch = cut_at(at)
    with pytest.raises(Killed):
        train(model, rows, out, watch, scheme=scheme, run={"checkpoint_every": 0.02}, **options)
    return train(model, rows, out, scheme=scheme, run={"resume": "auto"}, **options)


@pytest.mark.parametrize("scheme", [pg.AGN(window=3), pg.AEASGD(window=2), pg.DiLoCo(window=3), pg.Downpour()], ids=name_of)
@pytest.mark.parametrize("at", [7, 31])
def test_a_resumed_run_uses_the_rows_of_an_unbroken_one(scheme, at, model, rows, tmp_path):
    result = interrupted_then_resumed(model, rows, tmp_path / "run", scheme, at)
    assert every_batch_once(result.directory, TOTAL)
    assert result.summary["samples"] == 400 * 4


@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1,momentum=0.9", "adam:lr=0.01"])
def test_a_resumed_syncsgd_ends_bit_equal_with_dropout_and_batch_norm_counters(optimizer, rows, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 2))
    unbroken = train(model, rows, tmp_path / "whole", scheme=pg.SyncSGD(), optimizer=optimizer)
    resumed = interrupted_then_resumed(model, rows, tmp_path / "run", pg.SyncSGD(), 61, optimizer=optimizer)
    for mine, theirs in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert resumed.summary["commits"] == unbroken.summary["commits"]


def test_a_damaged_checkpoint_is_passed_over_and_said_aloud(model, rows, tmp_path):
    with pytest.raises(Killed):
        train(model, rows, tmp_path / "run", cut_at(60), scheme=pg.Downpour(), run={"checkpoint_every": 0.01})
    kept = sorted((tmp_path / "run" / "checkpoints").glob("0*"))
    assert len(kept) == 2
    file = kept[-1] / checkpoint.TENSORS
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    watch = Watch()
    result = train(model, rows, tmp_path / "run", watch, scheme=pg.Downpour(), run={"resume": True})
    said = [event.data["message"] for event in watch.events if event.kind == "note"]
    assert any(kept[-1].name in message and "damaged" in message for message in said)
    assert any(kept[0].name in message and "resumes" in message for message in said)
    assert every_batch_once(result.directory, TOTAL)


def test_a_half_written_checkpoint_is_not_taken_for_one(model, rows, tmp_path):
    folder = tmp_path / "checkpoints"
    good = checkpoint.save(folder, {"value": torch.ones(3)}, {"clock": 1})
    (folder / "0000000002").mkdir()
    (folder / "0000000002" / checkpoint.TENSORS).write_bytes(b"half")
    found, passed = checkpoint.newest(folder)
    assert found is not None
    assert found.path == good
    assert len(passed) == 1


def test_a_full_disk_keeps_the_last_checkpoint_and_the_run_goes_on(model, rows, tmp_path, monkeypatch):
    real, written = checkpoint.save_file, []

    def full(tensors, path, metadata=None):
        if written and path.name == checkpoint.TENSORS:
            raise checkpoint.SafetensorError("I/O error: No space left on device (os error 28)")  # not an OSError
        written.append(path)
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(checkpoint, "save_file", full)
    watch = Watch()
    result = train(model, rows, tmp_path / "run", watch, scheme=pg.Downpour(), run={"checkpoint_every": 0.02})
    assert result.stopped == "finished"
    assert any("No space left" in event.data["message"] for event in watch.events if event.kind == "warning")
    found, passed = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert not passed


def test_more_epochs_may_be_asked_for_on_resume(model, rows, tmp_path):
    train(model, rows, tmp_path / "run", scheme=pg.AGN(window=3), epochs=2)
    result = train(model, rows, tmp_path / "run", scheme=pg.AGN(window=3), epochs=4, run={"resume": True})
    assert every_batch_once(result.directory, TOTAL)


def test_another_training_in_the_same_directory_is_refused(model, rows, tmp_path):
    train(model, rows, tmp_path / "run", scheme=pg.AGN(window=3), epochs=1)
    with pytest.raises(pg.UsageError, match="already used"):
        train(model, rows, tmp_path / "run", scheme=pg.AGN(window=3), epochs=1)
    with pytest.raises(pg.UsageError, match="made with batch_size 8, and cannot be resumed with 16"):
        train(model, rows, tmp_path / "run", scheme=pg.AGN(window=3), batch_size=16, run={"resume": True})


def test_a_resume_of_nothing_is_refused_and_auto_begins(model, rows, tmp_path):
    with pytest.raises(pg.UsageError, match="no run to resume"):
        train(model, rows, tmp_path / "run", run={"resume": True})
    result = train(model, rows, tmp_path / "run", epochs=1, run={"resume": "auto"})
    assert result.stopped == "finished"


def test_the_record_forgets_what_was_lost(model, rows, tmp_path):
    result = interrupted_then_resumed(model, rows, tmp_path / "run", pg.Downpour(), 90)
    events = list(read(result.directory / "record.jsonl"))
    everything = Counter(e.data["sequence"] for e in events if e.kind == "commit" and e.data["worker"] == 0)
    assert sum(batches_used(events).values()) == TOTAL
    assert max(everything.values()) <= 2


def test_a_line_cut_short_by_a_kill_is_cut_off_before_more_is_written(model, rows, tmp_path):
    with pytest.raises(Killed):
        train(model, rows, tmp_path / "run", cut_at(40), scheme=pg.Downpour(), run={"checkpoint_every": 0.02})
    with (tmp_path / "run" / "record.jsonl").open("a") as record:
        record.write('{"event":"commit","clock":41,"wor')
    result = train(model, rows, tmp_path / "run", scheme=pg.Downpour(), run={"resume": True})
    assert every_batch_once(result.directory, TOTAL)


@pytest.mark.parametrize(
    "engine", [pg.Local(workers=2), pg.Network(workers=2, here=2), pg.Vector(workers=2)], ids=["local", "network", "vector"]
)
def test_a_mistake_that_nobody_foresaw_costs_no_update(engine, model, rows, tmp_path, monkeypatch):
    receive, seen = Center.receive, []

    def mistaken(self: Center, commit: pg.Commit) -> list[pg.Reply]:
        seen.append(commit)
        if len(seen) == 12:
            raise KeyError("a mistake")
        return receive(self, commit)

    monkeypatch.setattr(Center, "receive", mistaken)
    with pytest.raises(KeyError, match="a mistake"):
        train(copy.deepcopy(model), rows, tmp_path / "run", engine=engine, scheme=pg.AGN(window=3), epochs=2)
    assert max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()) == 11
    assert not (tmp_path / "run" / "center.json").exists(), "what the checkpoint holds is not kept twice"
    train(copy.deepcopy(model), rows, tmp_path / "run", engine=engine, scheme=pg.AGN(window=3), epochs=2, run={"resume": True})
    assert every_batch_once(tmp_path / "run", 100)
