"""The center: value, clock, ledger, leases and the scheme's slots, in two buffers and a flip.

One process applies commits. It writes the next state into the spare buffer, and then one number makes that the current state.
Readers always find a consistent state, even if the writer is killed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from paragrad.core import kernels, update
from paragrad.core.ledger import Counts, Ledger
from paragrad.core.private import PrivateStates
from paragrad.core.replies import Replies
from paragrad.core.rounds import Round, check_names
from paragrad.core.snapshot import CenterNumbers, CenterSnapshot, OwedReply, Presence
from paragrad.core.state import Allocate, TwoBuffers, private
from paragrad.data.leases import Leases
from paragrad.errors import Diverged, UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.schemes.traits import is_shared, keeps_state, name_of
from paragrad.types import Commit, Reply, Vector, VectorOptimizer

PATIENCE = 3
"""Consecutive refused commits of one worker that end a run as diverged."""


class RemoteSlices(Protocol):
    """The slices of value, slots and answers in other processes; they change together with the local one or not at all."""

    def prepare(self, commits: list[Commit]) -> Callable[[bool], bool]:
        """Begin to write the next state.

        Returns a function: call it with whether the local slice is finite; it blocks and returns whether all slices are.
        """

    def flip(self) -> None:
        """Make the prepared state the current one."""

    def hand(self, worker: int) -> None:
        """Write the value into a worker's row of answers."""

    def gather(self, local: CenterSnapshot) -> CenterSnapshot:
        """Return a snapshot of all slices."""

    def scatter(self, whole: CenterSnapshot) -> CenterSnapshot:
        """Continue from a snapshot of all slices. Return the local part."""

    def whole_optimizer(self) -> VectorOptimizer | None:
        """Return a new optimiser of the whole value; None if the center has none."""


class Center:
    """The central variable. Only ``join``, ``receive`` and ``leave`` change it, and each returns the replies that are due.

    ``applied`` is called with every applied commit.
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
        """``rows``: keep a row of answers per worker even if all workers could read the value itself."""
        check_names(scheme, ("center_slots", "worker_slots", "sends"))
        self.scheme = scheme
        self.workers = workers
        self.leases = leases
        self.optimizer = optimizer
        self.applied: Callable[[Commit], None] = lambda commit: None
        self.updated: Callable[[], None] = lambda: None
        """Called after each update, once ``applied`` was called with all of its commits."""
        self.refused: Callable[[Commit, str], None] = lambda commit, why: None
        self.repeated: Callable[[Commit, int], None] = lambda commit, arrived: None
        self.came: Callable[[int, int, int | None], None] = lambda worker, arrived, incarnation: None
        """Called with a worker that joins or leaves, its arrival number, and its incarnation (None if it leaves)."""
        self.before_update: Callable[[], None] | None = None
        """Called before the spare buffer is written."""
        self.live: set[int] = set()
        self.round = Round(scheme, workers)
        self.ledger = Ledger(workers)
        self.private = PrivateStates(kept=keeps_state(scheme))
        self._states = TwoBuffers(
            start, buffers, integers, slots=scheme.center_slots, workers=workers, aliased=is_shared(scheme), allocate=allocate
        )
        self.state = self._states.now
        """The current buffer."""
        self.buffered = bool(self.state.buffers.numel() or self.state.integers.numel())
        """True if the model has buffers, besides the value, that commits update."""
        alone = not self.round.gathers
        has_rows = (scheme.answers != "center" or alone or rows) and not is_shared(scheme)
        self.answers = [allocate(f"answer{k}", start.numel(), start.dtype) for k in range(workers if has_rows else 0)]
        """The row of answers of each worker."""
        self.remote: RemoteSlices | None = None
        """Other processes that hold the rest of the value, if it is sharded; this is then the first slice."""
        self.homes: list[Vector] = []
        """The workers' weights, if the engine gives access to them and the scheme is a scaled movement. A commit is then the
        weights themselves, and one pass computes the new center, anchor and weights."""
        self.replies = Replies(self, workers)
        self._held, self._drops_late = scheme.held, scheme.late == "drop"
        self._length = 0 if is_shared(scheme) else start.numel()
        # Usually the pass that writes the next state checks it, and the mean of a round of gradients is checked before the
        # optimiser uses it. A single gradient must be checked on arrival. So must a commit that waits in a round while its
        # worker continues: it cannot be rejected later.
        self._checks_late = scheme.held if self.round.gathers else optimizer is None
        self.twins = alone and scheme.elementwise and scheme.answers == "center" and bool(self.answers)
        """True if the pass that writes the value also writes the reply to a single commit."""
        self._scratch: Vector | None = None
        self.stepped = False
        """True if the present update has made a step of the center's optimiser."""
        self._optimizer_ahead = False
        """True if the optimiser made a step that was not applied, because the value would not be finite."""

    # -- read by others -------------------------------------------------------------------------------------

    @property
    def value(self) -> Vector:
        """The central variable; read only."""
        return self.state.value

    @property
    def clock(self) -> int:
        """Updates applied so far."""
        return self.state.clock

    @property
    def flips(self) -> int:
        """Number of times that the two buffers have changed places."""
        return int(self._states.control[0])

    @property
    def scratch(self) -> Vector:
        """Temporary memory of the value's length and type, allocated when first used."""
        if self._scratch is None:
            self._scratch = torch.empty_like(self.value)
        return self._scratch

    def last(self, worker: int) -> int:
        """Return the sequence of the worker's last applied commit."""
        return self.state.last(worker)

    @property
    def working(self) -> list[int]:
        """Live workers that have mini-batches, or will have with their next reply."""
        owed = self.replies.owed
        return sorted(w for w in self.live if self.leases.held(w) or (w in owed and self.leases.remain(w)))

    @property
    def progress(self) -> float:
        """Share of the run's mini-batches that were used."""
        return self.leases.used / self.leases.total

    @property
    def without_state(self) -> list[int]:
        """Workers with applied commits whose private state the center does not know."""
        with_one = (worker for worker, state in self.private.states.items() if state)
        committed = (worker for worker in range(self.workers) if self.last(worker))
        return sorted(set(committed).difference(with_one)) if self.private.are_kept else []

    @property
    def may_bring(self) -> list[int]:
        """Workers of ``without_state`` that have not reported that they cannot bring it."""
        return [worker for worker in self.without_state if worker not in self.private.states]

    def hands_state(self, worker: int) -> bool | None:
        """Return whether a worker that joins gets its predecessor's private state; None if there was none."""
        return worker in self.private.restored if self.private.are_kept and self.last(worker) else None

    def part(self, part: int) -> tuple[int, int]:
        """Return the range of a fragment of the vector."""
        length, parts = self.state.value.numel(), self.scheme.parts
        return length * part // parts, length * (part + 1) // parts

    # -- workers --------------------------------------------------------------------------------------------

    def join(self, worker: int, incarnation: int = 0) -> list[Reply]:
        """Let a worker begin, or the replacement of a lost one."""
        self._check_rank(worker)
        self.ledger.arrivals += 1
        self.came(worker, self.ledger.arrivals, incarnation)
        # The other workers do not wait for a worker that joins late.
        others = [self.ledger.commits[k] for k in self.working if k != worker] if self.clock else []
        self.ledger.joins(worker, incarnation, min(others, default=0))
        self.live.add(worker)
        self.leases.welcome(worker)
        self.leases.give_back(worker, keep=self.round.batches(worker))
        self.replies.wake()
        # A worker that gets its predecessor's state also gets the reply to its last commit, if the scheme answers each worker.
        self.replies.joins(worker, incarnation, own=self.scheme.answers == "own" and worker in self.private.restored)
        if self._held and self.round.of(worker):
            # Its predecessor's commit waits in the round. It counts, and the new worker begins after the round.
            return []
        return self._release()

    def leave(self, worker: int) -> list[Reply]:
        """Remove a worker that is not replaced: no worker waits for it, and others train its rows."""
        self._check_rank(worker)
        self.ledger.arrivals += 1
        self.came(worker, self.ledger.arrivals, None)
        self.live.discard(worker)
        self.replies.wake()
        self.leases.abandon(worker, keep=self.round.batches(worker))
        self.replies.leaves(worker)
        return self._advance()

    def receive(self, commit: Commit) -> list[Reply]:
        """Receive a commit. It counts once, and only if it is finite. Apply the round that it completes."""
        worker = commit.worker
        self._check_rank(worker)
        self.ledger.arrivals += 1
        lo, hi = (0, self._length) if self.scheme.parts == 1 else self.part(commit.part)
        if commit.value.numel() != hi - lo:
            raise UsageError(
                f"Worker {worker} committed {commit.value.numel():,} values, but the center has {hi - lo:,}. "
                "Every worker must build the same model."
            )
        replaced, known = self.ledger.is_replaced(commit), self._is_known(commit)
        if replaced or known or worker not in self.live:
            # It arrived before; or its worker was replaced or given up meanwhile, and others train its rows.
            self.ledger.counts.duplicates += 1
            self.repeated(commit, self.ledger.arrivals)
            return self.replies.again(commit) if known and not replaced else []
        commit.arrived = self.ledger.arrivals
        late = self._drops_late and commit.version < self.state.clock
        if late or not (self._checks_late or self._is_finite(commit)):
            return self._reject([commit], late=late)
        self.round.add(commit)
        self.replies.owed[worker] = OwedReply(commit.sequence, own=False, version=self.state.clock)
        return self._advance()

    def _is_known(self, commit: Commit) -> bool:
        """Return whether a commit arrived before: it was applied or rejected, or waits in the round."""
        if commit.sequence <= self.state.last(commit.worker) or self.ledger.is_rejected(commit):
            return True
        return bool(self.round.commits) and self.round.holds(commit)

    # -- the round ------------------------------------------------------------------------------------------

    def _advance(self) -> list[Reply]:
        """Apply the round if it is complete, and return the replies that are due."""
        if self.round.is_complete(self.live, self.leases):
            commits = self.round.take()
            if not self._apply(commits):
                return self._reject_unsound(commits)
        return self._release()

    def _release(self) -> list[Reply]:
        replies, done = self.replies.release()
        self.live.difference_update(done)
        if self.replies.owed and not replies and self.replies.let_sitting_work():
            return self._release()
        return replies + self._advance() if done else replies

    def _reject_unsound(self, commits: list[Commit]) -> list[Reply]:
        """Refuse the commits of a round that are not finite (all, if only their sum is not); the others stay."""
        bad = [c for c in commits if self.homes or not self._is_finite(c)] or commits
        self.round.put_back(c for c in commits if not any(c is b for b in bad))
        return self._reject(bad, late=False)

    def _apply(self, commits: list[Commit]) -> bool:
        """Write the next state and flip to it. Return False, without a flip, if a commit is not finite."""
        clock = self.clock
        for commit in commits:
            commit.staleness = clock - commit.version
        self.stepped = False
        if self.before_update is not None:
            self.before_update()
        others = None if self.remote is None else self.remote.prepare(commits)
        sound = update.write(self, *self._states.begin(), commits)
        if others is not None:
            sound = others(sound)
        if not sound:
            if self.stepped:
                self._optimizer_ahead = self.remote is None
                raise Diverged(
                    f"Training diverged: update {clock + 1} would have made the center infinite. Lower the learning rate."
                )
            return False
        for commit in commits:
            self.leases.retire(commit.worker, commit.batches)
            self.private.applied(commit)
        if self.leases.used == self.leases.total:
            self.replies.wake()
        if self.remote is not None:
            self.remote.flip()
        self._states.flip(commits)
        self.state = self._states.now
        for commit in commits:
            self.ledger.applied(commit)
            self.applied(commit)
            if self._held:
                self.replies.applied(commit.worker)
        self.updated()
        return True

    def _reject(self, commits: list[Commit], *, late: bool) -> list[Reply]:
        """Drop or refuse commits: the center does not change, and the rows are trained again."""
        for commit in commits:
            worker = commit.worker
            if late:
                self.ledger.counts.dropped += 1
                self.refused(commit, "late")
            else:
                in_a_row = self.ledger.refused(worker)
                self.refused(commit, "not finite")
                if in_a_row >= PATIENCE:
                    self._diverge(worker)
            if self.ledger.is_replaced(commit) or worker not in self.live:
                # No worker waits for this reply. A replacement gets its own leases.
                self.leases.give_back(worker, keep=tuple(set(self.leases.held(worker)).difference(commit.batches)))
                continue
            self.leases.give_back(worker, keep=self.round.batches(worker))
            self.ledger.rejected[worker] = commit.sequence
            self.replies.rejects(commit)
        self.replies.wake()
        replies = self._release()
        # The round waits for the rejected workers, which have their rows again; but not for those that left.
        return replies + self._advance() if self.round.is_complete(self.live, self.leases) else replies

    def _diverge(self, worker: int) -> None:
        name = name_of(self.scheme)
        other = "" if name == "agn" else f", or use a scheme that normalises its commits (agn) instead of {name}"
        raise Diverged(
            f"Training diverged: worker {worker} committed NaN or infinity {PATIENCE} times in a row, at update "
            f"{self.clock}. The center keeps its last finite weights. Lower the learning rate, or clip gradients "
            f"(clip_norm){other}."
        )

    # -- checks ---------------------------------------------------------------------------------------------

    def _check_rank(self, worker: int) -> None:
        if not 0 <= worker < self.workers:
            raise UsageError(f"Worker {worker} is unknown: this run has workers 0 to {self.workers - 1}.")

    def _is_finite(self, commit: Commit) -> bool:
        vectors = [commit.value, *commit.also.values()]
        if commit.buffers is not None:
            vectors.append(commit.buffers)
        return all(kernels.finite(vector) for vector in vectors)

    # -- snapshots ------------------------------------------------------------------------------------------

    def is_sound(self) -> bool:
        """Return whether a run can continue from here: not if the optimiser or shared weights have diverged."""
        return not self._optimizer_ahead and (not is_shared(self.scheme) or kernels.finite(self.value))

    def snapshot(self) -> CenterSnapshot:
        """Return a consistent copy."""
        state = self.state
        keeps_answers = self.scheme.answers != "center"
        local = CenterSnapshot(
            numbers=self.numbers(),
            value=state.value.clone(),
            buffers=state.buffers.clone(),
            integers=state.integers.clone(),
            slots={name: slot.clone() for name, slot in state.slots.items()},
            answers={k: answer.clone() for k, answer in enumerate(self.answers)} if keeps_answers else {},
            optimizer={} if self.optimizer is None else {name: t.clone() for name, t in self.optimizer.state().items()},
            residuals={worker: residual.clone() for worker, residual in self.private.residuals.items()},
            workers=dict(self.private.states),
        )
        return local if self.remote is None else self.remote.gather(local)

    def model(self) -> dict[str, torch.Tensor]:
        """Return ``value``, ``buffers`` and ``integers`` of the model; read only."""
        buffers, integers = self.state.buffers, self.state.integers
        value = self.value
        if self.remote is not None:
            value = self.remote.gather(CenterSnapshot(self.numbers(), value, buffers, integers)).value
        return {"value": value, "buffers": buffers, "integers": integers}

    def reunite(self) -> None:
        """Take over the slices of other processes, once all workers have ended."""
        if self.remote is None:
            return
        whole = self.snapshot()
        self._states = TwoBuffers(
            whole.value,
            whole.buffers,
            whole.integers,
            slots=self.scheme.center_slots,
            workers=self.workers,
            aliased=False,
            allocate=private,
        )
        self._states.load(whole)
        self.state = self._states.now
        self.answers = [whole.answers.get(k, whole.value).clone() for k in range(self.workers)]
        self.optimizer = self.remote.whole_optimizer()
        if self.optimizer is not None:
            self.optimizer.load(whole.optimizer)
        self.remote = None

    def numbers(self, *, durable: bool = False) -> CenterNumbers:
        """Return the plain numbers of a snapshot; ``durable``: with the live workers and the replies owed to them.

        Durable numbers and the vectors restore the center exactly, except for commits that wait in a round. A worker that
        waits for its reply sends its commit again; the rows of a worker that continued are trained again.
        """
        return CenterNumbers(
            clock=self.clock,
            ledger=self.state.numbers[1:].tolist(),
            leases=self.leases.state(),
            counts=vars(self.ledger.counts).copy(),
            arrivals=self.ledger.arrivals,
            commits=list(self.ledger.commits),
            speeds=list(self.ledger.speeds),
            sitting=self.replies.sitting(),
            presence=self._presence() if durable else None,
        )

    def _presence(self) -> Presence:
        ledger, replies, waiting = self.ledger, self.replies, self.round.blocked
        return Presence(
            live=sorted(self.live),
            incarnations=list(ledger.incarnations),
            refusals=list(ledger.refusals),
            rejected=list(ledger.rejected),
            owed={worker: owed for worker, owed in replies.owed.items() if worker not in waiting},
            resting=dict(replies.resting),
            given=list(replies.given),
            looked_ahead=list(replies.looked_ahead),
            gone_on=[] if self._held else [(commit.worker, commit.batches) for commit in self.round.commits],
            forgotten=[commit.arrived for commit in self.round.commits],
        )

    def restore(self, snapshot: CenterSnapshot) -> None:
        """Continue from a snapshot. Leased rows are trained again, unless the snapshot knows the live workers."""
        numbers, presence = snapshot.numbers, snapshot.numbers.presence
        self.private.states = dict(snapshot.workers)
        self.private.restored = dict(snapshot.workers)
        local = snapshot if self.remote is None else self.remote.scatter(snapshot)
        self._states.load(local)
        for k, answer in enumerate(self.answers):
            answer.copy_(local.answers.get(k, local.value))
        if self.optimizer is not None:
            self.optimizer.load(local.optimizer)
        self.private.residuals = {k: t.to(self.value.device, copy=True) for k, t in local.residuals.items() if k < self.workers}
        self.leases = Leases.from_state(numbers.leases)
        ledger = self.ledger
        if presence is None:
            for worker in range(self.workers):
                self.leases.give_back(worker)
        else:
            self.live = set(presence.live)
            ledger.incarnations, ledger.refusals = list(presence.incarnations), list(presence.refusals)
            ledger.rejected = list(presence.rejected)
            for worker, batches in presence.gone_on:
                self.leases.give_back(worker, keep=tuple(set(self.leases.held(worker)).difference(batches)))
        self.replies.restore(presence, numbers.sitting)
        ledger.counts, ledger.arrivals = Counts(**numbers.counts), numbers.arrivals
        ledger.commits, ledger.speeds = list(numbers.commits), list(numbers.speeds)
