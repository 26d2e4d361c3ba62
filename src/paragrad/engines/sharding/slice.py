"""A slice of a center that is spread over several processes: its two buffers, answers, and commits that wait to be applied.

It decides nothing. Another process says which commits make an update; what it says is numbered by the clock, so that
the same, said again after somebody was killed, changes nothing twice.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from paragrad.core import kernels, update
from paragrad.core.center import Center
from paragrad.core.snapshot import CenterSnapshot
from paragrad.data.leases import Leases
from paragrad.engines.process.segment import Segment
from paragrad.engines.transport.header import read
from paragrad.engines.transport.message import Malformed, Refused
from paragrad.optim.cut import FLAGS, CutOptimizer, side_name
from paragrad.optim.optimizer import OptimizerLike
from paragrad.schemes.scheme import Scheme
from paragrad.types import COMMIT, Commit, Vector

FREE, FILLING, STAGED = range(3)
WORKER, INCARNATION, SEQUENCE, STATE = range(4)
_EMPTY = torch.empty(0)
_MOST = dict.fromkeys(COMMIT.lists, sys.maxsize)
"""Largest length of a commit's lists: the center has checked them."""


class _SliceCenter(Center):
    """The real one, of a slice. What it cannot know, of workers and their rows, it is told."""

    optimizer: CutOptimizer | None
    told_working: list[int]
    told_progress = 0.0

    @property
    def working(self) -> list[int]:
        return self.told_working

    @property
    def progress(self) -> float:
        return self.told_progress

    def write(self, commits: list[Commit]) -> bool:
        """The next state, into the spare buffer; False where it is not finite."""
        self.stepped = False
        if self.optimizer is not None:
            self.optimizer.begin()
        return update.write(self, *self._states.begin(), commits)

    def move(self, commits: list[Commit]) -> None:
        """The spare buffer is the state now."""
        self._states.flip(commits)
        self.state = self._states.now
        if self.optimizer is not None:
            self.optimizer.flip()

    def copy_of(self, clock: int) -> Vector | None:
        """The value of that clock, where it is the present one, or the one before it and nothing was written over it yet."""
        for state in self._states.both:
            if state.clock == clock and (state is self.state or self._states.control[1] < self._states.control[0] + 2):
                return state.value.clone()
        return None

    def take_up(self) -> None:
        """Go on from what the memory holds by now."""
        self._states.take_up()
        self.state = self._states.now
        if self.optimizer is not None:
            self.optimizer.take_up(self.flips & 1)

    def load(self, snapshot: CenterSnapshot) -> None:
        """Continue from a snapshot of the slice."""
        self._states.load(snapshot)
        for k, answer in enumerate(self.answers):
            answer.copy_(snapshot.answers.get(k, snapshot.value))
        if self.optimizer is not None:
            self.optimizer.load(snapshot.optimizer)


class Slice:
    """All of it lies in a segment, from which another process goes on where this one is killed. Not to be used by two threads
    at once, but for ``room`` of different workers, and ``answer``."""

    def __init__(
        self,
        scheme: Scheme,
        *,
        workers: int,
        length: int,
        dtype: torch.dtype,
        segment: Segment,
        optimizer: OptimizerLike | None = None,
    ) -> None:
        """``optimizer``: what the center steps with, where it does."""
        allocate = segment.allocate
        self.scheme = scheme
        self.segment = segment
        leases = Leases(batches=1, epochs=1, workers=workers)
        start = torch.zeros(length, dtype=dtype)
        cut = None if optimizer is None else CutOptimizer(optimizer, length, dtype, allocate)
        self.center = _SliceCenter(scheme, start, workers=workers, leases=leases, optimizer=cut, allocate=allocate, rows=True)
        self._versions = allocate("versions", workers, torch.int64).numpy()
        """The clock of each worker's answer."""
        # What a worker was last given is read by the update that writes its next answer: where that is made again, it must be
        # there still.
        self._undo = [allocate(f"undo{k}", length, dtype) for k in range(workers)] if scheme.answers == "remembered" else []
        self._undone = allocate("undone", 1 + workers, torch.int64).numpy()
        count = workers if scheme.held else 2 * workers + scheme.quorum(workers)
        self._table = allocate("stages", 4 * count, torch.int64).numpy().reshape(count, 4)
        names = ("value", *(f"also.{name}" for name in scheme.sends))
        self._stages = [{name: allocate(f"stage{j}.{name}", length, dtype) for name in names} for j in range(count)]
        self._prepared: tuple[int, list[Commit], dict[str, bool]] | None = None
        self._newest = [0] * workers

    # -- what workers lay down ------------------------------------------------------------------------------

    def room(self, worker: int, incarnation: int, sequence: int) -> dict[str, Vector]:
        """Where a worker's slice of a commit goes; it counts once ``stage`` has been called."""
        if incarnation < self._newest[worker]:
            raise Refused("gone: another has taken this worker's place.")
        self._newest[worker] = incarnation
        found = self._find(worker, incarnation, sequence)
        if found is None:
            found = self._make_room(worker)
            self._table[found] = (worker, incarnation, sequence, FILLING)
        return self._stages[found]

    def stage(self, worker: int, incarnation: int, sequence: int) -> None:
        """All of it has come."""
        found = self._find(worker, incarnation, sequence)
        if found is None:
            raise Refused("gone: a later commit of this worker has come.")
        if not all(kernels.finite(vector) for vector in self._stages[found].values()):
            self._table[found][STATE] = FREE
            raise Malformed(f"Commit {sequence} of worker {worker} is not finite, which its worker should have seen.")
        self._table[found][STATE] = STAGED

    def _find(self, worker: int, incarnation: int, sequence: int) -> int | None:
        for j, (w, i, s, state) in enumerate(self._table.tolist()):
            if state != FREE and (w, i, s) == (worker, incarnation, sequence):
                return j
        return None

    def _make_room(self, worker: int) -> int:
        if self.scheme.held:
            # It was answered, or it could not send another: what it sent before has been applied or refused.
            self._table[self._table[:, WORKER] == worker, STATE] = FREE
        free = [j for j, state in enumerate(self._table[:, STATE].tolist()) if state == FREE]
        if not free:
            raise Malformed("More commits wait here than the scheme allows for.")
        return free[0]

    # -- what the center says -------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        """Updates applied so far."""
        return self.center.clock

    def prepare(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Write the next state; the answer says whether it is finite and the optimiser was moved, or which commits are not
        here."""
        clock: int = said["clock"]
        if clock <= self.clock:
            return {"finite": True}
        self._check_clock(clock - 1)
        commits = [Commit(value=_EMPTY, **read(COMMIT, header, _MOST)) for header in said["commits"]]
        if self._prepared is not None and self._prepared[0] == clock and _same(self._prepared[1], commits):
            return self._prepared[2]
        missing = [commit.worker for commit in commits if not self._fill(commit)]
        if missing:
            return {"finite": False, "missing": missing}
        self._save_answers(clock, commits)
        center = self.center
        center.live, center.told_working, center.told_progress = set(said["live"]), said["working"], said["progress"]
        center.ledger.commits, center.ledger.speeds = said["counts"], said["speeds"]
        self._prepared = None
        sound = center.write(commits)
        answer = {"finite": sound, "stepped": center.stepped}
        self._prepared = (clock, commits, answer)
        return answer

    def flip(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """What was prepared is the state now; the answer may say that it must be prepared again."""
        clock: int = said["clock"]
        if clock == self.clock:
            return {"clock": clock}
        if self._prepared is None or self._prepared[0] != clock or not self._prepared[2]["finite"]:
            return {"unprepared": True}
        commits = self._prepared[1]
        if self.scheme.held:
            for commit in commits:
                self._versions[commit.worker] = clock
        self.center.move(commits)
        self._prepared = None
        self._forget(commits, {tuple(key) for key in said["waiting"]})
        return {"clock": clock}

    def _forget(self, commits: Sequence[Commit], waiting: set[tuple[int, ...]]) -> None:
        """Commits that were applied, and those that were turned away since: not those that wait, nor their worker's latest."""
        applied = {(commit.worker, commit.incarnation, commit.sequence) for commit in commits}
        latest: dict[int, tuple[int, ...]] = {}
        for w, i, s, state in self._table.tolist():
            if state != FREE:
                latest[w] = max(latest.get(w, (w, 0, 0)), (w, i, s))
        for row in self._table:
            key = tuple(row[:STATE].tolist())
            if row[STATE] != FREE and (key in applied or not (key in waiting or key == latest[key[0]])):
                row[STATE] = FREE

    def hand(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """A worker's answer is the value as it is."""
        self._check_clock(said["clock"])
        worker = said["worker"]
        self.center.answers[worker].copy_(self.center.value)
        self._versions[worker] = said["clock"]
        self._undone[1 + worker] = 0
        return {}

    def answer(self, worker: int, version: int) -> Vector:
        """What a worker is answered with; raises where that is another by now."""
        if self._versions[worker] != version:
            raise Refused(f"gone: the answer to worker {worker} is that of clock {self._versions[worker]}, not {version}.")
        return self.center.answers[worker]

    def tensors(self, clock: int) -> dict[str, torch.Tensor]:
        """Value, slots, answers and the optimiser's state at a clock: that of now, or the one before it."""
        return tensors_in(self.segment, self.scheme.center_slots, self.center.workers, clock)

    def load(self, tensors: Mapping[str, torch.Tensor], clock: int, ledger: Sequence[int], versions: Sequence[int]) -> None:
        """Continue from tensors of a clock; ``versions``: the clock of each worker's reply."""
        now = self.center.state
        numbers = replace(self.center.numbers(), clock=clock, ledger=list(ledger))
        self.center.load(CenterSnapshot.read({**tensors, "buffers": now.buffers, "integers": now.integers}, numbers))
        self._versions[:] = versions
        self._undone[:] = 0
        self._prepared = None

    def take_over(self, left: Segment) -> None:
        """Go on from what a slice that was killed has left: all of it, for a center that was killed too may be one update
        behind."""
        for name in left.layout:
            self.segment.tensor(name).copy_(left.tensor(name))
        self.center.take_up()
        for row in self._table:
            worker, incarnation, sequence, state = row.tolist()
            if state != STAGED or sequence <= self.center.last(worker):
                row[STATE] = FREE
            else:
                self._newest[worker] = max(self._newest[worker], incarnation)

    # -- inside ---------------------------------------------------------------------------------------------

    def _check_clock(self, clock: int) -> None:
        if clock != self.clock:
            raise Malformed(f"This slice is at clock {self.clock}, and was told of {clock}.")

    def _fill(self, commit: Commit) -> bool:
        """Give a commit its vectors; False where they are not here."""
        found = self._find(commit.worker, commit.incarnation, commit.sequence)
        if found is None or self._table[found][STATE] != STAGED:
            return False
        commit.value = self._stages[found]["value"]
        commit.also = {name: self._stages[found][f"also.{name}"] for name in self.scheme.sends}
        return True

    def _save_answers(self, clock: int, commits: Sequence[Commit]) -> None:
        if not self._undo:
            return
        answers = self.center.answers
        if self._undone[0] != clock:
            self._undone[1:] = 0
        for worker in self._undone[1:].nonzero()[0].tolist():
            answers[worker].copy_(self._undo[worker])
        for commit in commits:
            self._undo[commit.worker].copy_(answers[commit.worker])
            self._undone[1 + commit.worker] = 1
        self._undone[0] = clock  # last: until here nothing has been written over


def now(segment: Segment) -> torch.Tensor:
    """The clock of a slice, and the last sequence of each worker, in whatever process it was."""
    return segment.tensor(f"numbers{int(segment.tensor('control')[0]) & 1}")


def tensors_in(segment: Segment, slots: Sequence[str], workers: int, clock: int) -> dict[str, torch.Tensor]:
    """What a slice holds, or has left, of a clock: its last, or the one before it. They are the slice's own memory."""
    sides = [side for side in (0, 1) if int(segment.tensor(f"numbers{side}")[0]) == clock]
    current = int(segment.tensor("control")[0]) & 1
    if not sides:
        raise Malformed(f"This slice has nothing of clock {clock}; it is at {int(now(segment)[0])}.")
    side = current if current in sides else sides[0]
    found = {"value": segment.tensor(f"value{side}")}
    found |= {f"slot.{name}": segment.tensor(f"{name}{side}") for name in slots}
    undone = segment.tensor("undone").tolist()
    for k in range(workers):
        again = undone[0] == clock + 1 and undone[1 + k]
        found[f"answer.{k}"] = segment.tensor(f"undo{k}" if again else f"answer{k}")
    if FLAGS in segment.layout and segment.tensor(FLAGS)[side]:
        each, one = side_name("", side, each=True), side_name("", side, each=False)
        for name in segment.layout:
            if name.startswith(each):
                found[f"optimizer.{name.removeprefix(each)}"] = segment.tensor(name)
            elif name.startswith(one):
                found[f"optimizer.{name.removeprefix(one)}"] = segment.tensor(name).view(())
    return found


def _same(these: Sequence[Commit], those: Sequence[Commit]) -> bool:
    return [(c.worker, c.incarnation, c.sequence) for c in these] == [(c.worker, c.incarnation, c.sequence) for c in those]
