"""The center's state in a mapped file: whenever its process is killed, what is left is one whole state, never a mixture."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import paragrad as pg
from paragrad.core.center import Center
from paragrad.core.flat import Flat
from paragrad.data.leases import Leases
from paragrad.engines.net import durable_state
from paragrad.engines.net.durable_state import SIDECAR, DurableState, left_in
from paragrad.engines.process import mapped_file
from paragrad.optim.centeroptimizer import CenterOptimizer
from paragrad.types import Commit, Reply
from tests.engines.net.victim import AT_THE_CENTER, PACKAGE

SIZE, WORKERS, BATCHES = 5, 2, 40
SCHEMES: list[tuple[pg.Scheme, str | None]] = [
    (pg.AGN(window=1), None),
    (pg.DCASGD(), "sgd:lr=0.1"),
    (pg.ADAG(window=1), None),
    (pg.AEASGD(window=1), None),
    (pg.SyncSGD(), "adam:lr=0.1"),
    (pg.SyncSGD(), "sgd:lr=0.1,momentum=0.9"),
    (pg.DiLoCo(window=1), None),
    (pg.SoftSync(), "adagrad:lr=0.1"),
]


class Kept:
    """A center in a mapped file, and workers that bring random commits."""

    def __init__(self, scheme: pg.Scheme, optimizer: str | None, directory: Path, seed: int) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.memory = DurableState(directory, size=0, workers=WORKERS, window=1)
        module = nn.Linear(SIZE, 1, bias=False)
        nn.init.ones_(module.weight)
        flat = Flat([("weight", module.weight)])
        self.center = Center(
            scheme,
            torch.ones(SIZE),
            workers=WORKERS,
            leases=Leases(batches=BATCHES, epochs=1, workers=WORKERS),
            buffers=torch.zeros(2),
            integers=torch.zeros(1, dtype=torch.int64),
            optimizer=None if optimizer is None else CenterOptimizer(optimizer, module, flat),
            allocate=self.memory.segment.allocate,
        )
        self.center.before_update = self.before
        self.had: dict[int, Reply] = {}
        self.answered: set[int] = set()

    def before(self) -> None:
        if self.memory.flips != self.center.flips:
            self.answered |= set(range(WORKERS))
            self.keep()

    def keep(self) -> None:
        numbers = {"center": self.center.numbers(durable=True).plain(), "slots": list(self.center.scheme.center_slots)}
        self.memory.keep(self.center, numbers, self.answered)
        self.answered.clear()

    def deliver(self, replies: list[Reply]) -> None:
        self.answered |= {reply.worker for reply in replies}
        self.keep()
        self.had |= {reply.worker: reply for reply in replies}

    def event(self) -> None:
        """Somebody commits, or is replaced."""
        worker = self.random.randrange(WORKERS)
        reply = self.had.pop(worker, None)
        if reply is None or not reply.batches or self.random.random() < 0.1:
            self.deliver(self.center.join(worker, self.center.ledger.incarnations[worker] + 1))
            return
        value = torch.randn(SIZE, generator=self.generator)
        if self.random.random() < 0.1:
            value[1] = float("nan")
            self.center.ledger.refusals[worker] = 0
        commit = Commit(
            worker=worker,
            incarnation=self.center.ledger.incarnations[worker],
            sequence=max(reply.sequence, reply.last, 0) + 1,
            version=reply.version,
            value=value,
            steps=1,
            weight=8.0,
            rows=8,
            batches=reply.batches,
            buffers=torch.randn(2, generator=self.generator),
            integers=torch.tensor([self.random.randrange(9)]),
        )
        self.deliver(self.center.receive(commit))

    def digest(self, folder: Path) -> str:
        """All that another process would go on from."""
        left = left_in(folder)
        assert left is not None
        # Answers that the center does not remember by are made again for who asks again, and so no part of the state.
        parts = {
            n: t for n, t in left.tensors.items() if self.center.scheme.answers == "remembered" or not n.startswith("answer.")
        }
        told = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in parts.items()}
        return json.dumps([told, left.numbers], sort_keys=True)


class Snapshots:
    """Copies of the file and of what is said of it, at every line of what the center does."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.taken: dict[bytes, tuple[bytes, bytes]] = {}
        self._seen: tuple[bytes, bytes] | None = None

    def during(self, act: Callable[[], None]) -> None:
        sys.settrace(self._call)
        try:
            act()
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        return self._line if name.startswith(PACKAGE) and name.removeprefix(PACKAGE).startswith(AT_THE_CENTER) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        fd = self._kept.memory.segment.fd
        copy = os.pread(fd, os.fstat(fd).st_size, 0), (self._kept.directory / SIDECAR).read_bytes()
        if copy != self._seen:
            self._seen = copy
            self.taken[hashlib.sha256(b"".join(copy)).digest()] = copy
        return self._line

    def digests(self, folder: Path) -> set[str]:
        """What another process would have found at each of those moments."""
        found = set()
        folder.mkdir(exist_ok=True)
        for data, sidecar in self.taken.values():
            told = json.loads(sidecar)
            if "file" not in told:
                continue
            (folder / "copy.center").write_bytes(data)
            (folder / SIDECAR).write_text(json.dumps({**told, "file": str(folder / "copy.center")}))
            found.add(self._kept.digest(folder))
        return found


@pytest.mark.parametrize(("scheme", "optimizer"), SCHEMES, ids=lambda value: getattr(value, "name", str(value)))
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 30))
def test_what_a_kill_leaves_is_the_state_before_or_the_one_after(scheme, optimizer, seed, tmp_path_factory):
    directory = tmp_path_factory.mktemp("memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_file, "FAST", directory)
        patch.setattr(durable_state, "PAGE", 1 << 13)
        kept = Kept(scheme, optimizer, directory, seed)
        kept.keep()
        before, between = kept.digest(directory), 0
        for _ in range(8):
            snapshots = Snapshots(kept)
            snapshots.during(kept.event)
            after = kept.digest(directory)
            found = snapshots.digests(directory / "copy")
            assert found <= {before, after}
            between += len(snapshots.taken)
            left = left_in(directory)
            assert torch.equal(left.tensors["value"], kept.center.value)
            assert left.numbers["center"]["ledger"] == [kept.center.last(worker) for worker in range(WORKERS)]
            if scheme.answers == "remembered":
                assert all(torch.equal(left.tensors[f"answer.{k}"], kept.center.answers[k]) for k in range(WORKERS))
            before = after
        assert between > 20
        kept.memory.discard()
        kept.memory.segment.close()
        assert [path.name for path in directory.iterdir()] == ["copy"]


def test_a_center_killed_before_it_had_begun_leaves_what_was_there_before_and_no_file_for_ever(tmp_path):
    kept = Kept(pg.AGN(window=1), None, tmp_path, 1)
    kept.keep()
    kept.event()
    state = kept.digest(tmp_path)
    second = DurableState(tmp_path, size=0, workers=WORKERS, window=1)  # killed here, and so was the first
    assert kept.digest(tmp_path) == state
    third = DurableState(tmp_path, size=0, workers=WORKERS, window=1)
    assert kept.digest(tmp_path) == state
    third.segment.allocate("control", 1, torch.int64)
    third.keep(kept.center, {"center": kept.center.numbers(durable=True).plain(), "slots": []}, set())
    assert [path.exists() for path in (kept.memory.path, second.path, third.path)] == [False, False, True]
    third.discard()
    for one in (kept.memory, second, third):
        one.segment.close()


def test_what_was_left_before_the_machine_was_started_again_is_not_looked_for(tmp_path, monkeypatch):
    kept = Kept(pg.AGN(window=1), None, tmp_path, 1)
    kept.keep()
    assert left_in(tmp_path) is not None
    monkeypatch.setattr(mapped_file, "boot", lambda: "another")
    assert left_in(tmp_path) is None
    kept.memory.discard()
    assert left_in(tmp_path) is None
    kept.memory.segment.close()
