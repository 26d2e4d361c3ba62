"""A slice of a sharded center: its two buffers, the replies, and the commits that wait to be applied.

The center's process decides which commits make an update. Its requests are numbered by the clock, so that a request which is
repeated after a kill changes nothing twice.
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
    """A center of one slice. It knows no workers or rows: the center's process sends ``given_working`` and
    ``given_progress``."""

    optimizer: CutOptimizer | None
    given_working: list[int]
    given_progress = 0.0

    @property
    def working(self) -> list[int]:
        return self.given_working

    @property
    def progress(self) -> float:
        return self.given_progress

    def write(self, commits: list[Commit]) -> bool:
        """Write the next state into the spare buffer; return False if it is not finite."""
        self.stepped = False
        if self.optimizer is not None:
            self.optimizer.begin()
        return update.write(self, *self._states.begin(), commits)

    def move(self, commits: list[Commit]) -> None:
        """Make the spare buffer the current state."""
        self._states.flip(commits)
        self.state = self._states.now
        if self.optimizer is not None:
            self.optimizer.flip()

    def copy_of(self, clock: int) -> Vector | None:
        """Return a copy of the value at a clock: the current one, or the previous one until it is overwritten; else None."""
        for state in self._states.both:
            if state.clock == clock and (state is self.state or self._states.control[1] < self._states.control[0] + 2):
                return state.value.clone()
        return None

    def take_up(self) -> None:
        """Continue from the present contents of the memory."""
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
    """A slice in a segment, from which another process continues if this one is killed. Only one thread may use it at a time,
    except for the memory that ``room`` and ``answer`` return."""

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
        """``optimizer``: that of the center, if it has one."""
        allocate = segment.allocate
        self.scheme = scheme
        self.segment = segment
        leases = Leases(batches=1, epochs=1, workers=workers)
        start = torch.zeros(length, dtype=dtype)
        cut = None if optimizer is None else CutOptimizer(optimizer, length, dtype, allocate)
        self.center = _SliceCenter(scheme, start, workers=workers, leases=leases, optimizer=cut, allocate=allocate, rows=True)
        self._versions = allocate("versions", workers, torch.int64).numpy()
        """The clock of each worker's reply."""
        # An update reads a worker's last reply and overwrites it. If the update is repeated, the last reply must still exist.
        self._undo = [allocate(f"undo{k}", length, dtype) for k in range(workers)] if scheme.answers == "remembered" else []
        self._undone = allocate("undone", 1 + workers, torch.int64).numpy()
        count = workers if scheme.held else 2 * workers + scheme.quorum(workers)
        self._table = allocate("stages", 4 * count, torch.int64).numpy().reshape(count, 4)
        names = ("value", *(f"also.{name}" for name in scheme.sends))
        self._stages = [{name: allocate(f"stage{j}.{name}", length, dtype) for name in names} for j in range(count)]
        self._prepared: tuple[int, list[Commit], dict[str, bool]] | None = None
        self._newest = [0] * workers

    # -- uploads of workers ---------------------------------------------------------------------------------

    def room(self, worker: int, incarnation: int, sequence: int) -> dict[str, Vector]:
        """Return the memory for a worker's slice of a commit; it counts once ``stage`` has been called."""
        if incarnation < self._newest[worker]:
            raise Refused("gone: the rank of this worker has been given to another.")
        self._newest[worker] = incarnation
        found = self._find(worker, incarnation, sequence)
        if found is None:
            found = self._make_room(worker)
            self._table[found] = (worker, incarnation, sequence, FILLING)
        return self._stages[found]

    def stage(self, worker: int, incarnation: int, sequence: int) -> None:
        """Make an upload count, once all of it has arrived."""
        found = self._find(worker, incarnation, sequence)
        if found is None:
            raise Refused("gone: this worker has sent a later commit.")
        if not all(kernels.finite(vector) for vector in self._stages[found].values()):
            self._table[found][STATE] = FREE
            raise Malformed(f"Commit {sequence} of worker {worker} is not finite: its worker must not upload it.")
        self._table[found][STATE] = STAGED

    def _find(self, worker: int, incarnation: int, sequence: int) -> int | None:
        for j, (w, i, s, state) in enumerate(self._table.tolist()):
            if state != FREE and (w, i, s) == (worker, incarnation, sequence):
                return j
        return None

    def _make_room(self, worker: int) -> int:
        if self.scheme.held:
            # A worker sends a commit only after the reply to the one before, which was applied or rejected.
            self._table[self._table[:, WORKER] == worker, STATE] = FREE
        free = [j for j, state in enumerate(self._table[:, STATE].tolist()) if state == FREE]
        if not free:
            raise Malformed("More commits wait here than the scheme allows.")
        return free[0]

    # -- requests of the center -----------------------------------------------------------------------------

    def prepare(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Write the next state; return whether it is finite and whether the optimiser has stepped, or the workers whose commits
        are missing."""
        clock: int = header["clock"]
        if clock <= self.center.clock:
            return {"finite": True}
        self._check_clock(clock - 1)
        commits = [Commit(value=_EMPTY, **read(COMMIT, fields, _MOST)) for fields in header["commits"]]
        if self._prepared is not None and self._prepared[0] == clock and _keys(self._prepared[1]) == _keys(commits):
            return self._prepared[2]
        missing = [commit.worker for commit in commits if not self._fill(commit)]
        if missing:
            return {"finite": False, "missing": missing}
        self._save_answers(clock, commits)
        center = self.center
        center.live, center.given_working, center.given_progress = set(header["live"]), header["working"], header["progress"]
        center.ledger.commits, center.ledger.speeds = header["counts"], header["speeds"]
        self._prepared = None
        finite = center.write(commits)
        answer = {"finite": finite, "stepped": center.stepped}
        self._prepared = (clock, commits, answer)
        return answer

    def flip(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Make the prepared state the current one; the answer may say that it must be prepared again."""
        clock: int = header["clock"]
        if clock == self.center.clock:
            return {"clock": clock}
        if self._prepared is None or self._prepared[0] != clock or not self._prepared[2]["finite"]:
            return {"unprepared": True}
        commits = self._prepared[1]
        if self.scheme.held:
            for commit in commits:
                self._versions[commit.worker] = clock
        self.center.move(commits)
        self._prepared = None
        self._forget(commits, {tuple(key) for key in header["waiting"]})
        return {"clock": clock}

    def _forget(self, commits: Sequence[Commit], waiting: set[tuple[int, ...]]) -> None:
        """Free the stages of applied and rejected commits: all but those that wait, and the latest of each worker."""
        applied = set(_keys(commits))
        latest: dict[int, tuple[int, ...]] = {}
        for w, i, s, state in self._table.tolist():
            if state != FREE:
                latest[w] = max(latest.get(w, (w, 0, 0)), (w, i, s))
        for row in self._table:
            key = tuple(row[:STATE].tolist())
            if row[STATE] != FREE and (key in applied or not (key in waiting or key == latest[key[0]])):
                row[STATE] = FREE

    def hand(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Write the value into a worker's row of replies."""
        self._check_clock(header["clock"])
        worker = header["worker"]
        self.center.answers[worker].copy_(self.center.value)
        self._versions[worker] = header["clock"]
        self._undone[1 + worker] = 0
        return {}

    def answer(self, worker: int, version: int) -> Vector:
        """Return a worker's reply; raise ``Refused`` if it is of another version."""
        if self._versions[worker] != version:
            raise Refused(f"gone: the reply to worker {worker} is that of clock {self._versions[worker]}, not {version}.")
        return self.center.answers[worker]

    def tensors(self, clock: int) -> dict[str, torch.Tensor]:
        """Return value, slots, replies and the optimiser's state at a clock: the current one, or the previous one."""
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
        """Continue from the memory of a killed process. All of it is copied: a center that was killed as well may be one update
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
        if clock != self.center.clock:
            raise Malformed(f"This slice is at clock {self.center.clock}, but the request is for clock {clock}.")

    def _fill(self, commit: Commit) -> bool:
        """Give a commit its vectors; return False if they are missing."""
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
        self._undone[0] = clock  # last: nothing has been overwritten so far


def tensors_in(segment: Segment, slots: Sequence[str], workers: int, clock: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a slice at its last clock or the previous one, in the memory of the slice."""
    clocks = [int(segment.tensor(f"numbers{side}")[0]) for side in (0, 1)]
    current = int(segment.tensor("control")[0]) & 1
    if clock not in clocks:
        raise Malformed(f"This slice has no state of clock {clock}; it is at clock {clocks[current]}.")
    side = current if clocks[current] == clock else 1 - current
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


def _keys(commits: Sequence[Commit]) -> list[tuple[int, ...]]:
    return [(commit.worker, commit.incarnation, commit.sequence) for commit in commits]
