"""What a codec has left out, in a file of the worker's machine: at whatever moment the worker is killed, the next finds it."""

from __future__ import annotations

import os
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paragrad as pg
from paragrad.codecs.feedback import Feedback
from paragrad.engines.net import residual_file
from paragrad.engines.net.residual_file import ResidualFile
from paragrad.engines.process import mapped_file
from paragrad.types import Commit, Reply

LIKE = torch.zeros(40)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_file, "FAST", tmp_path)
    return tmp_path


def reply(sequence: int, last: int, *, applied: bool = True, residual: torch.Tensor | None = None) -> Reply:
    return Reply(0, sequence, 0, LIKE, 1, (), applied=applied, last=last, residual=residual)


class Worker:
    """The part of a worker that has to do with its residual."""

    def __init__(self, run: str, last: int) -> None:
        self.left = ResidualFile(LIKE, run, 0)
        self.taken = last in self.left.kept
        row = self.left.of(last) if self.taken else self.left.rows[0].zero_()
        self.feedback = Feedback(pg.TopK(0.2), self.left.rows)
        self.feedback.begin(row)
        self.left.answered(reply(-1, last, residual=row), None)

    def commit(self, value: torch.Tensor, sequence: int) -> Commit:
        coded = self.feedback.encode(value, torch.empty_like(value))
        return Commit(0, sequence, 0, coded.value, 1, residual=coded.residual)

    def killed(self) -> None:
        self.left.close(keep=True)


MOMENTS = ("no", "while it codes", "before it sends", "in flight, applied", "in flight, refused", "refused", "answered")


@given(st.lists(st.sampled_from(MOMENTS), min_size=1, max_size=25), st.integers(0, 1000))
def test_whatever_the_moment_of_a_kill_what_was_sent_and_what_is_left_are_all_that_was_meant(moments, seed):
    torch.manual_seed(seed)
    run, last = os.urandom(6).hex(), 0
    meant, sent = torch.zeros(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)
    worker = Worker(run, last)
    for moment in moments:
        value = torch.randint(-8, 9, (40,)).float()  # whole numbers: sums are exact
        commit = worker.commit(value, last + 1)
        if moment == "while it codes":
            commit.residual.copy_(torch.full((40,), torch.nan))
        elif moment != "before it sends":
            worker.left.sent(commit)
        if moment in ("no", "in flight, applied", "answered"):
            last, meant, sent = last + 1, meant + value, sent + commit.value
        if moment in ("no", "answered"):
            worker.feedback.settle()
            worker.left.answered(reply(last, last), commit)
        elif moment == "refused":
            worker.left.answered(reply(last + 1, last, applied=False), commit)
        if moment not in ("no", "refused"):
            worker.killed()
            worker = Worker(run, last)
            assert worker.taken == (last > 0)
        assert torch.equal(sent + worker.feedback.residual, meant), moment
    worker.left.close(keep=False)
    assert not list(mapped_file.FAST.iterdir())


def test_a_place_on_which_another_process_works_still_is_not_written_to(folder):
    first = ResidualFile(LIKE, "run", 3)
    first.rows[0].fill_(7)
    second = ResidualFile(LIKE, "run", 3)
    second.rows[0].fill_(9)
    assert second.kept == []
    assert bool((first.rows[0] == 7).all())
    second.close(keep=False)
    assert [path.name for path in folder.iterdir()] == ["paragrad-run-3.residual"]
    assert (folder / "paragrad-run-3.residual").stat().st_mode & 0o777 == 0o600
    first.close(keep=False)
    assert not list(folder.iterdir())


def test_a_link_or_another_model_is_nothing_to_go_on_from(folder):
    (folder / "elsewhere").write_bytes(b"mine")
    (folder / "paragrad-run-0.residual").symlink_to(folder / "elsewhere")
    left = ResidualFile(LIKE, "run", 0)
    assert left.kept == []
    left.close(keep=False)
    assert (folder / "elsewhere").read_bytes() == b"mine"
    longer = ResidualFile(torch.zeros(9000), "run", 1)
    longer._numbers[:] = torch.tensor([4, 5])
    longer.close(keep=True)
    again = ResidualFile(torch.zeros(9000), "run", 1)
    assert again.kept == [4, 5]
    again.close(keep=True)
    assert ResidualFile(torch.zeros(20_000), "run", 1).kept == []


def test_what_nobody_has_come_for_in_a_day_is_removed(folder):
    for name in ("old", "new"):
        ResidualFile(LIKE, name, 0).close(keep=True)
    before = time.time() - residual_file.STALE - 60
    os.utime(folder / "paragrad-old-0.residual", (before, before))
    ResidualFile(LIKE, "mine", 0).close(keep=True)
    assert sorted(path.name for path in folder.iterdir()) == ["paragrad-mine-0.residual", "paragrad-new-0.residual"]


def test_what_a_finished_run_left_is_removed_unless_it_is_used_or_another_runs(folder):
    left, used, other = (ResidualFile(LIKE, run, rank) for run, rank in (("mine", 0), ("mine", 1), ("other", 0)))
    for file in (left, other):
        file.close(keep=True)
    residual_file.discard("mine")
    assert {path.name for path in folder.iterdir()} == {"paragrad-mine-1.residual", "paragrad-other-0.residual"}
    used.close(keep=True)
