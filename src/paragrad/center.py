"""The central variable: value, clock, ledger, leases and the scheme's slots, in two buffers and a flip.

One process applies commits. It writes the next state into the spare buffer and then moves one number, so that
whoever reads the center, at whatever moment it or its reader is killed, finds one whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from paragrad import kernels, update
from paragrad.data.leases import Leases
from paragrad.errors import Diverged, UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.state import Allocate, TwoBuffers, private
from paragrad.types import Batches, Commit, Reply, Vector, VectorOptimizer
from paragrad.view import View

PATIENCE = 3
"""Refused commits in a row from one worker that end a run as diverged."""


@dataclass
class Counts:
    """What has happened at the center so far."""

    commits: int = 0
    refused: int = 0
    dropped: int = 0
    duplicates: int = 0
    steps: int = 0
    rows: int = 0


@dataclass(slots=True)
class _Pending:
    """An answer that is owed to a worker."""

    sequence: int
    own: bool
    version: int
    applied: bool = True
    placed: bool = False
    sits_out: int | None = None
    """The clock of a round that has nothing for this worker."""
    progress: float | None = None
    """What was said of the progress of the run, where it was answered before: the same is said again."""


class Elsewhere(Protocol):
    """What lies of the value, slots and answers in other processes, which change with it or not at all."""

    def prepare(self, commits: list[Commit]) -> Callable[[bool], bool]:
        """Begin to write the next state there; the answer, told whether it is finite here, waits, and says whether all is."""

    def flip(self) -> None:
        """What was prepared is the state now."""

    def hand(self, worker: int) -> None:
        """This worker's answer is the value as it is."""

    def gather(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What lies here, and what lies there, as one."""

    def scatter(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """The inverse; returns what lies here."""

    def whole_optimizer(self) -> VectorOptimizer | None:
        """One for all of the value, as after it was made; None where the center has none."""


def check_quorum(scheme: Scheme, workers: int) -> int:
    """How many commits make a round; raises where so many workers cannot bring them."""
    quorum = scheme.quorum(workers)
    if scheme.bound is not None and quorum == workers > 1 and scheme.held:
        raise UsageError(f"{scheme!r} is synchronous: a bound on staleness has no meaning, leave it out.")
    if not 1 <= quorum <= workers:
        raise UsageError(f"{scheme!r} needs a quorum of {quorum} commits from {workers} workers; it must be 1 to {workers}.")
    return quorum


class Center:
    """The one thing that is changed in place, and only by ``join``, ``receive`` and ``leave``.

    Each of them returns the replies that have become due; ``applied`` is called with every commit that enters.
    """

    def __init__(
        self,
        scheme: Scheme,
        start: Vector,
        *,
        workers: int,
        leases: Leases,
        buffers: Vector | None = None,
        integers: Vector | None = None,
        optimizer: VectorOptimizer | None = None,
        allocate: Allocate = private,
        rows: bool = False,
    ) -> None:
        """``rows``: an answer row for each worker, also where all could read the value itself."""
        quorum = check_quorum(scheme, workers)
        for kind in ("center_slots", "worker_slots", "sends"):
            if isinstance(getattr(scheme, kind), str):
                raise UsageError(
                    f"{type(scheme).__name__}.{kind} is a text, but it must be a tuple of names: a comma is missing."
                )
        self.scheme = scheme
        self.workers = workers
        self.leases = leases
        self.optimizer = optimizer
        self.counts = Counts()
        self.applied: Callable[[Commit], None] = lambda commit: None
        self.refused: Callable[[Commit, str], None] = lambda commit, why: None
        self.repeated: Callable[[Commit, int], None] = lambda commit, arrived: None
        self.came: Callable[[int, int, int | None], None] = lambda worker, arrived, incarnation: None
        """Called with a worker that has joined, its arrival and its incarnation, or None for one that has left."""
        self.arrivals = 0
        """Commits that have come in, and workers that have joined or left."""
        self.speeds = [0.0] * workers
        self.commits_of = [0] * workers
        self.live: set[int] = set()
        self._states = TwoBuffers(
            start, buffers, integers, slots=scheme.center_slots, workers=workers, aliased=scheme.aliased, allocate=allocate
        )
        self.state = self._states.now
        """The current buffer."""
        self.buffered = bool(self.state.buffers.numel() or self.state.integers.numel())
        """Whether there is anything beside the value that commits are averaged in."""
        owns = scheme.answers == "own" or scheme.remembers or quorum == 1 or rows
        self.answers = (
            [allocate(f"answer{k}", start.numel(), start.dtype) for k in range(workers)] if owns and not scheme.aliased else []
        )
        self.elsewhere: Elsewhere | None = None
        """Other processes that hold the rest of the value, where this is the first slice of it."""
        self.homes: list[Vector] = []
        """The workers' weights, where an engine has them within reach and the scheme is a scaled movement: a commit is then
        the weights themselves, and one pass makes the new center, the new anchor and the new weights of them."""
        # What a scheme says of itself is asked for at every commit: a plain attribute is had at a tenth of the time.
        self._held, self._overlap, self._drops_late = scheme.held, bool(scheme.overlap), scheme.late == "drop"
        self._length = 0 if scheme.aliased else start.numel()
        self._whole = scheme.parts == 1
        self._aligned = scheme.held and quorum > 1
        self._gathers = quorum > 1
        self._may_wait = scheme.bound is not None or type(scheme).waits is not Scheme.waits
        self._may_differ = type(scheme).steps is not Scheme.steps
        # The next state is looked at in the pass that writes it, and not flipped to where it is not finite; the mean of a
        # round of gradients, before the optimiser sees it. A gradient that steps alone must be looked at on arrival, and
        # what waits in a round while its worker goes on: that cannot be taken back from it later.
        self._checks_late = scheme.held if quorum > 1 else optimizer is None
        self.twins = quorum == 1 and scheme.elementwise and scheme.answers == "center" and not scheme.remembers
        """A lone commit's answer is written in the same pass as the value."""
        self.twins = self.twins and bool(self.answers)
        self._scratch: Vector | None = None
        self.stepped = False
        """Whether the update that is being made has moved the center's optimiser."""
        self._ahead = False
        """Whether the optimiser has made a step that the value has not, since that would not have been finite."""
        self.residuals: dict[int, Vector] = {}
        """What a codec has left out of the applied commits of each worker, where that is known here."""
        self._round: list[Commit] = []
        self._owed: dict[int, _Pending] = {}
        self._resting: dict[int, _Pending] = {}
        """Answers that are owed to workers for whom there is nothing to do, unless another leaves rows behind."""
        self._incarnations = [0] * workers
        self._refusals = [0] * workers
        self._turned_away = [0] * workers
        """The sequence of the last commit of each worker's present incarnation that was dropped or refused."""
        self._given: list[_Pending | None] = [None] * workers
        """What each worker was last answered, should it ask again."""
        self._sitting_at_restore: set[int] = set()
        self.before_update: Callable[[], None] | None = None
        """Called before the spare buffer is written to, for who keeps the state from one update to the next."""
        self._looked_ahead = [False] * workers
        """With overlap: whether a worker was given, with its window of a round, that of the next, which may be none."""

    # -- what others may read -------------------------------------------------------------------------------

    @property
    def value(self) -> Vector:
        """The central variable; not to be written to."""
        return self.state.value

    @property
    def clock(self) -> int:
        """Updates applied so far."""
        return self.state.clock

    @property
    def flips(self) -> int:
        """How often the two buffers have changed places."""
        return int(self._states.control[0])

    @property
    def scratch(self) -> Vector:
        """A vector to compute in, as long as the value and of its type; made when it is first wanted."""
        if self._scratch is None:
            self._scratch = torch.empty_like(self.value)
        return self._scratch

    def last(self, worker: int) -> int:
        """The sequence of the worker's last applied commit."""
        return self.state.last(worker)

    @property
    def waiting(self) -> list[Commit]:
        """Commits that have come in and wait for the rest of their round."""
        return list(self._round)

    @property
    def working(self) -> list[int]:
        """Live workers that have something to do, or will have once they are answered."""
        return sorted(w for w in self.live if self.leases.held(w) or (w in self._owed and self.leases.remain(w)))

    @property
    def progress(self) -> float:
        """Share of the run's mini-batches that have been used."""
        return self.leases.used / self.leases.total

    # -- what workers do ------------------------------------------------------------------------------------

    def join(self, worker: int, incarnation: int = 0) -> list[Reply]:
        """A worker, or the replacement of a lost one, is there and wants to begin."""
        self._check_rank(worker)
        self.arrivals += 1
        self.came(worker, self.arrivals, incarnation)
        self._incarnations[worker] = max(incarnation, self._incarnations[worker])
        self._turned_away[worker] = 0
        self._looked_ahead[worker] = False
        if self.clock:
            # A newcomer does not hold back those who went on without it.
            others = [self.commits_of[k] for k in self.working if k != worker]
            self.commits_of[worker] = max(self.commits_of[worker], min(others, default=0))
        self.live.add(worker)
        self.leases.welcome(worker)
        self.leases.give_back(worker, keep=self._waiting(worker))
        self._wake()
        before = self._owed.get(worker)
        sits_out = worker in self._sitting_at_restore or (before is not None and before.sits_out == self.clock)
        self._sitting_at_restore.discard(worker)
        self._owed[worker] = _Pending(sequence=-1 - incarnation, own=False, version=self.clock)
        if sits_out:
            # Its predecessor had nothing to do in this round: neither has it, or it would bring rows of the next.
            self._owed[worker].sits_out = self.clock
        if any(commit.worker == worker for commit in self._round) and self.scheme.held:
            # Its predecessor's commit waits in the round: it counts, and the newcomer begins after it.
            return []
        return self._release()

    def leave(self, worker: int) -> list[Reply]:
        """A worker is gone and will not be replaced: nobody waits for it, others do its rows."""
        self._check_rank(worker)
        self.arrivals += 1
        self.came(worker, self.arrivals, None)
        self.live.discard(worker)
        self._wake()
        self._owed.pop(worker, None)
        self.leases.abandon(worker, keep=self._waiting(worker))
        for owed in self._owed.values():
            owed.sits_out = None  # what it leaves behind may be for them
        return self._advance()

    def receive(self, commit: Commit) -> list[Reply]:
        """Take one commit: exactly once, only if it is sound, and apply the round that it completes."""
        worker = commit.worker
        self._check_rank(worker)
        self.arrivals += 1
        lo, hi = (0, self._length) if self._whole else self.part(commit.part)
        if commit.value.numel() != hi - lo:
            raise UsageError(
                f"Worker {worker} committed {commit.value.numel():,} values, but the center has {hi - lo:,}. "
                "Every worker must build the same model."
            )
        replaced, known = self._replaced(commit), self._known(commit)
        if replaced or known or worker not in self.live:
            # It came before; or its worker was replaced or given up while it was on its way, and others do its rows already.
            self.counts.duplicates += 1
            self.repeated(commit, self.arrivals)
            return self._answer_again(commit) if known and not replaced else []
        commit.arrived = self.arrivals
        clock = self.state.clock
        late = self._drops_late and commit.version < clock
        if late or not (self._checks_late or self._finite(commit)):
            return self._turn_away([commit], late=late)
        if self._gathers and not self._held:
            commit = commit.copied()  # its worker goes on meanwhile, and will lay its next one in the same place
        self._round.append(commit)
        self._owed[worker] = _Pending(commit.sequence, own=False, version=clock)
        return self._advance()

    def _replaced(self, commit: Commit) -> bool:
        """Whether another has taken the place of this commit's worker."""
        return commit.incarnation < self._incarnations[commit.worker]

    def _known(self, commit: Commit) -> bool:
        """Whether it came before: it was applied or turned away, or waits in the round."""
        worker, sequence = commit.worker, commit.sequence
        if sequence <= self.state.last(worker) or sequence <= self._turned_away[worker]:
            return True
        return bool(self._round) and any(c.worker == worker and c.sequence == sequence for c in self._round)

    def _answer_again(self, commit: Commit) -> list[Reply]:
        """A repeated commit: its answer is on the way, or is given again with the leases that went with it."""
        worker, given = commit.worker, self._given[commit.worker]
        if worker in self._owed or worker in self._resting or (given is not None and given.sequence != commit.sequence):
            return []
        waiting = self._waiting(worker)
        held = tuple(position for position in self.leases.held(worker) if position not in waiting)
        # The first answer may still arrive: where the center keeps what it gave, it gives the same. One that was restored
        # since does not know when that was.
        again = bool(self.answers) and given is not None
        owed = given or _Pending(commit.sequence, own=self.scheme.answers == "own", version=self.clock)
        return [self._reply(worker, owed, batches=held, steps=self._steps(worker), again=again)]

    # -- the round ------------------------------------------------------------------------------------------

    def _advance(self) -> list[Reply]:
        """Apply the round if it is complete, and hand out what is owed."""
        if self._complete():
            commits = sorted(self._round, key=lambda c: (c.worker, c.sequence)) if self._gathers else self._round
            self._round = []
            if not self._apply(commits):
                return self._turn_away_unsound(commits)
        return self._release()

    def _turn_away_unsound(self, commits: list[Commit]) -> list[Reply]:
        """Refuse those of a round that are not finite (all, if it is only their sum); the others stay in the round."""
        bad = [c for c in commits if self.homes or not self._finite(c)] or commits
        self._round = [c for c in commits if not any(c is b for b in bad)] + self._round
        return self._turn_away(bad, late=False)

    def _complete(self) -> bool:
        if not self._round:
            return False
        if not self._gathers:
            return True
        here = {commit.worker for commit in self._round}
        quorum = self.scheme.quorum(self.workers)
        if not self.scheme.held:
            at_work = any(w in self.live and len(self.leases.held(w)) > self._in_round(w) for w in range(self.workers))
            return len(self._round) >= quorum or not at_work
        if len(here) >= quorum:
            return True
        return not any(w not in here and self.leases.held(w) for w in self.live)

    def _waiting(self, worker: int) -> tuple[int, ...]:
        """The mini-batches of this worker's commits that wait in the round: they count, whatever becomes of the worker."""
        return tuple(position for commit in self._round if commit.worker == worker for position in commit.batches)

    def _in_round(self, worker: int) -> int:
        return len(self._waiting(worker)) if self._round else 0

    def _apply(self, commits: list[Commit]) -> bool:
        """Write the next state and flip to it; False, and no flip, where a commit turns out not to be finite."""
        clock = self.clock
        for commit in commits:
            commit.staleness = clock - commit.version
        self.stepped = False
        if self.before_update is not None:
            self.before_update()
        others = None if self.elsewhere is None else self.elsewhere.prepare(commits)
        sound = update.write(self, *self._states.begin(), commits)
        if others is not None:
            sound = others(sound)
        if not sound:
            if self.stepped:
                self._ahead = self.elsewhere is None
                raise Diverged(
                    f"Training diverged: update {clock + 1} would have made the center infinite. Lower the learning rate."
                )
            return False
        for commit in commits:
            self.leases.retire(commit.worker, commit.batches)
            if commit.residual is not None:
                self.residuals[commit.worker] = commit.residual
            else:
                self.residuals.pop(commit.worker, None)
        if self.leases.used == self.leases.total:
            self._wake()
        if self.elsewhere is not None:
            self.elsewhere.flip()
        self._states.flip(commits)
        self.state = self._states.now
        for commit in commits:
            self._note(commit)
            if self._held and commit.worker in self._owed:
                owed = self._owed[commit.worker]
                # A newcomer that took a lost worker's place begins from the center, whatever the answer was.
                owed.own = bool(self.answers) and owed.sequence >= 0
                owed.placed = owed.own and bool(self.homes)
                owed.version = clock + 1
        return True

    def _note(self, commit: Commit) -> None:
        self._refusals[commit.worker] = 0
        if commit.seconds > 0:
            rate = commit.steps / commit.seconds
            old = self.speeds[commit.worker]
            self.speeds[commit.worker] = rate if old == 0 else 0.5 * (old + rate)
        self.commits_of[commit.worker] += 1
        self.counts.commits += 1
        self.counts.steps += commit.steps
        self.counts.rows += commit.rows
        self.applied(commit)

    def _turn_away(self, commits: list[Commit], *, late: bool) -> list[Reply]:
        """Dropped or refused: the center is untouched, the rows are done again from the center as it is."""
        for commit in commits:
            worker = commit.worker
            if late:
                self.counts.dropped += 1
                self.refused(commit, "late")
            else:
                self.counts.refused += 1
                self._refusals[worker] += 1
                self.refused(commit, "not finite")
                if self._refusals[worker] >= PATIENCE:
                    name = self.scheme.name
                    other = "" if name == "agn" else f", or choose a scheme that normalises its commits (agn) instead of {name}"
                    raise Diverged(
                        f"Training diverged: worker {worker} committed NaN or infinity {PATIENCE} times in a row, at update "
                        f"{self.clock}. The center keeps its last finite weights. Lower the learning rate, or clip gradients "
                        f"(clip_norm){other}."
                    )
            if self._replaced(commit) or worker not in self.live:
                # Nobody waits for its answer; a replacement has leases of its own, or will have them.
                self.leases.give_back(worker, keep=tuple(set(self.leases.held(worker)).difference(commit.batches)))
                continue
            self.leases.give_back(worker, keep=self._waiting(worker))
            self._turned_away[worker] = commit.sequence
            self._looked_ahead[worker] = False
            self._owed[worker] = _Pending(commit.sequence, own=False, version=self.clock, applied=False)
        self._wake()
        replies = self._release()
        # They hold their rows again, and the others of the round wait for them; but not for those that are gone.
        return replies + self._advance() if self._complete() else replies

    # -- replies --------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """There may be something to do for those who rest: rows were left behind, or none are left at all."""
        self._owed |= self._resting
        self._resting.clear()

    def _release(self) -> list[Reply]:
        """Every reply that is owed and need not wait any longer, each with the lease of the next window."""
        replies: list[Reply] = []
        done: list[int] = []
        clock, leases = self.state.clock, self.leases
        gathered = {commit.worker for commit in self._round} if self._round and self._held else ()
        for worker in sorted(self._owed):
            if worker in gathered or self._owed[worker].sits_out == clock:
                continue
            if self._may_wait and self.scheme.waits(View(self, self.state, self.state, 0, 0), worker):
                continue
            steps = self._steps(worker)
            ahead = leases.count(worker) - self._in_round(worker)
            batches = self._take(worker, steps, ahead)
            if not batches and not ahead and leases.used < leases.total:
                # Nothing for it now. In a round it sits out; else it stays, for rows that another may leave behind.
                if self._aligned:
                    self._owed[worker].sits_out = clock
                else:
                    self._resting[worker] = self._owed.pop(worker)
                continue
            reply = self._reply(worker, self._owed.pop(worker), batches=batches, steps=steps)
            replies.append(reply)
            if reply.done:
                done.append(worker)
        if done:
            self.live.difference_update(done)
        if not self._owed:
            return replies + self._advance() if done else replies
        sitting = [o for w, o in self._owed.items() if o.sits_out == clock and leases.remain(w)]
        if sitting and not replies and not any(leases.held(w) for w in self.live):
            for owed in sitting:
                owed.sits_out = None  # there is nobody whose round they could sit out
            return self._release()
        return replies + self._advance() if done else replies

    def _take(self, worker: int, steps: int, ahead: int) -> Batches:
        """The lease of a worker's next window; with overlap, of the one after it too."""
        if not self._overlap:
            return self.leases.take(worker, max(0, steps - ahead), aligned=self._aligned)
        if not self._aligned:
            return self.leases.take(worker, max(0, 2 * steps - ahead))
        # In rounds it is places that count: a window of none, at the end of an epoch, is one that the worker sits out.
        looked, self._looked_ahead[worker] = self._looked_ahead[worker], True
        if looked and not ahead:
            self._looked_ahead[worker] = False
            return ()
        return self.leases.take(worker, steps if looked else 2 * steps, aligned=True)

    def _steps(self, worker: int) -> int:
        """The length of a worker's next window."""
        if not self._may_differ:
            return self.scheme.window
        return max(1, min(self.scheme.steps(View(self, self.state, self.state, 0, 0), worker), self.scheme.window))

    def _reply(self, worker: int, owed: _Pending, *, batches: tuple[int, ...], steps: int = 0, again: bool = False) -> Reply:
        state, clock, answers = self.state, self.state.clock, self.answers
        own = again or (owed.own and (owed.version == clock or self.scheme.answers == "own"))
        if answers and not own:
            answers[worker].copy_(state.value)
            if self.elsewhere is not None:
                self.elsewhere.hand(worker)
        version = owed.version if own else clock
        last = state.last(worker)
        if self._round:
            last = max([last, *(commit.sequence for commit in self._round if commit.worker == worker)])
        progress = self.progress if owed.progress is None else owed.progress
        placed = own and owed.placed
        # What was owed is what was given, but for the weights: where it is asked for again, it must be taken from the answer.
        owed.own, owed.version, owed.placed, owed.sits_out, owed.progress = own, version, False, None, progress
        self._given[worker] = owed
        return Reply(
            worker=worker,
            sequence=owed.sequence,
            version=version,
            value=answers[worker] if answers else state.value,
            steps=steps,
            batches=batches,
            applied=owed.applied,
            placed=placed,
            last=last,
            done=not batches and self.leases.count(worker) <= self._in_round(worker),
            progress=progress,
            buffers=state.buffers,
            integers=state.integers,
            residual=self._residual(worker) if owed.sequence < 0 else None,
        )

    def _residual(self, worker: int) -> Vector | None:
        """What a newcomer's first commit takes along: left by the last commit in its place that counts, or will."""
        waiting = [commit.residual for commit in self._round if commit.worker == worker]
        return waiting[-1] if waiting else self.residuals.get(worker)

    def forget_residual(self, worker: int) -> None:
        """What the commits in this place have left out is lost."""
        self.residuals.pop(worker, None)
        for commit in self._round:
            if commit.worker == worker:
                commit.residual = None

    # -- checks ---------------------------------------------------------------------------------------------

    def _check_rank(self, worker: int) -> None:
        if not 0 <= worker < self.workers:
            raise UsageError(f"Worker {worker} is unknown: this run has workers 0 to {self.workers - 1}.")

    def part(self, part: int) -> tuple[int, int]:
        """From where to where a fragment goes."""
        length, parts = self.state.value.numel(), self.scheme.parts
        return length * part // parts, length * (part + 1) // parts

    def _finite(self, commit: Commit) -> bool:
        vectors = [commit.value, *commit.also.values()]
        if commit.buffers is not None:
            vectors.append(commit.buffers)
        return all(kernels.finite(vector) for vector in vectors)

    # -- checkpoints ----------------------------------------------------------------------------------------

    def is_sound(self) -> bool:
        """Whether a run could go on from here: not once it has diverged and there was no way back."""
        return not self._ahead and (not self.scheme.aliased or kernels.finite(self.value))

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """A consistent copy: tensors, and plain numbers. Commits that wait in a round are not in it."""
        tensors = self.state.tensors()
        if self.scheme.remembers or self.scheme.answers == "own":
            tensors |= {f"answer.{k}": answer.clone() for k, answer in enumerate(self.answers)}
        if self.optimizer is not None:
            tensors |= {f"optimizer.{name}": t.clone() for name, t in self.optimizer.state().items()}
        tensors |= {f"residual.{worker}": residual.clone() for worker, residual in self.residuals.items()}
        if self.elsewhere is not None:
            tensors = self.elsewhere.gather(tensors)
        return tensors, self.snapshot_numbers()

    def whole(self) -> Vector:
        """The value, with what lies elsewhere; not to be written to."""
        return self.value if self.elsewhere is None else self.elsewhere.gather({"value": self.value})["value"]

    def reunite(self) -> None:
        """Take in what lies elsewhere, once nobody works any more."""
        if self.elsewhere is None:
            return
        tensors, numbers = self.snapshot()
        self._states = TwoBuffers(
            tensors["value"],
            tensors["buffers"],
            tensors["integers"],
            slots=self.scheme.center_slots,
            workers=self.workers,
            aliased=False,
            allocate=private,
        )
        self._states.load(tensors, numbers["clock"], numbers["ledger"])
        self.state = self._states.now
        self.answers = [tensors.get(f"answer.{k}", tensors["value"]).clone() for k in range(self.workers)]
        self.optimizer = self.elsewhere.whole_optimizer()
        self._load_optimizer(tensors)
        self.elsewhere = None

    def snapshot_numbers(self) -> dict[str, Any]:
        """The plain numbers of a snapshot."""
        return {
            "clock": self.clock,
            "ledger": self.state.numbers[1:].tolist(),
            "leases": self.leases.state(),
            "counts": vars(self.counts).copy(),
            "arrivals": self.arrivals,
            "commits_of": list(self.commits_of),
            "speeds": list(self.speeds),
            "sitting": [worker for worker, owed in self._owed.items() if owed.sits_out == self.clock],
        }

    def memory(self) -> dict[str, Any]:
        """The numbers of a snapshot, and who is there and is owed what: with the vectors, the center as it is to the last bit.

        Of commits that wait in a round only the rows are known: a worker that waits for its answer sends its own again, and
        those of one that has gone on are done again.
        """
        numbers = self.snapshot_numbers()
        waiting = {commit.worker for commit in self._round} if self._held else set()
        numbers["present"] = {
            "live": sorted(self.live),
            "incarnations": list(self._incarnations),
            "refusals": list(self._refusals),
            "turned_away": list(self._turned_away),
            "owed": {str(worker): asdict(owed) for worker, owed in self._owed.items() if worker not in waiting},
            "resting": {str(worker): asdict(owed) for worker, owed in self._resting.items()},
            "given": [None if given is None else asdict(given) for given in self._given],
            "looked_ahead": list(self._looked_ahead),
            "gone_on": [] if self._held else [[commit.worker, list(commit.batches)] for commit in self._round],
            "forgotten": [commit.arrived for commit in self._round],
        }
        return numbers

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Go on from a snapshot, for which what was leased is to be done again; or from ``memory``, as if nothing had been."""
        if self.elsewhere is not None:
            tensors = self.elsewhere.scatter(tensors, numbers)
        self._states.load(tensors, numbers["clock"], numbers["ledger"])
        for k, answer in enumerate(self.answers):
            answer.copy_(tensors.get(f"answer.{k}", tensors["value"]))
        self._load_optimizer(tensors)
        kept = ((worker, tensors.get(f"residual.{worker}")) for worker in range(self.workers))
        self.residuals = {worker: t.to(self.value.device, copy=True) for worker, t in kept if t is not None}
        self.leases = Leases.from_state(numbers["leases"])
        if "present" in numbers:
            self._recall(numbers["present"])
        else:
            for worker in range(self.workers):
                self.leases.give_back(worker)
        self.counts = Counts(**numbers["counts"])
        self.arrivals = numbers["arrivals"]
        self.commits_of = list(numbers["commits_of"])
        self.speeds = list(numbers["speeds"])
        self._sitting_at_restore = set() if "present" in numbers else set(numbers["sitting"])

    def _load_optimizer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.optimizer is not None:
            prefix = "optimizer."
            self.optimizer.load({k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)})

    def _recall(self, present: Mapping[str, Any]) -> None:
        self.live = set(present["live"])
        self._incarnations, self._refusals = list(present["incarnations"]), list(present["refusals"])
        self._turned_away = list(present["turned_away"])
        self._looked_ahead = list(present["looked_ahead"])
        self._owed = {int(worker): _Pending(**owed) for worker, owed in present["owed"].items()}
        self._resting = {int(worker): _Pending(**owed) for worker, owed in present["resting"].items()}
        self._given = [None if given is None else _Pending(**given) for given in present["given"]]
        for worker, batches in present["gone_on"]:
            self.leases.give_back(worker, keep=tuple(set(self.leases.held(worker)).difference(batches)))
