"""The central variable: value, clock, ledger, leases and the scheme's slots, in two buffers and a flip.

One process applies commits. It writes the next state into the spare buffer and then moves one number, so that
whoever reads the center, at whatever moment it or its reader is killed, finds one whole state.
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
"""Refused commits in a row from one worker that end a run as diverged."""


class RemoteSlices(Protocol):
    """The part of value, slots and answers that other processes hold; it changes with the rest or not at all."""

    def prepare(self, commits: list[Commit]) -> Callable[[bool], bool]:
        """Begin to write the next state. Returns a function: call it with whether the local slice is finite; it blocks and
        returns whether all slices are."""

    def flip(self) -> None:
        """Make what was prepared the state."""

    def hand(self, worker: int) -> None:
        """Write the value into a worker's row of replies."""

    def gather(self, local: CenterSnapshot) -> CenterSnapshot:
        """Return a snapshot of the whole."""

    def scatter(self, whole: CenterSnapshot) -> CenterSnapshot:
        """The inverse; returns the local part."""

    def whole_optimizer(self) -> VectorOptimizer | None:
        """Return an optimiser of the whole value, as after it was made; None where the center has none."""


class Center:
    """Changed in place, and only by ``join``, ``receive`` and ``leave``.

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
        """``rows``: there is a row of replies for each worker, also where all could read the value itself."""
        check_names(scheme, ("center_slots", "worker_slots", "sends"))
        self.scheme = scheme
        self.workers = workers
        self.leases = leases
        self.optimizer = optimizer
        self.applied: Callable[[Commit], None] = lambda commit: None
        self.updated: Callable[[], None] = lambda: None
        """Called after each update, once ``applied`` has seen all of its commits."""
        self.refused: Callable[[Commit, str], None] = lambda commit, why: None
        self.repeated: Callable[[Commit, int], None] = lambda commit, arrived: None
        self.came: Callable[[int, int, int | None], None] = lambda worker, arrived, incarnation: None
        """Called with a worker that has joined, its arrival and its incarnation, or None for one that has left."""
        self.before_update: Callable[[], None] | None = None
        """Called before the spare buffer is written to."""
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
        """Whether there is anything beside the value that commits are averaged in."""
        alone = not self.round.gathers
        owns = scheme.answers != "center" or alone or rows
        self.answers = (
            [allocate(f"answer{k}", start.numel(), start.dtype) for k in range(workers)]
            if owns and not is_shared(scheme)
            else []
        )
        """The row of replies of each worker."""
        self.remote: RemoteSlices | None = None
        """Other processes that hold the rest of the value, where this is the first slice of it."""
        self.homes: list[Vector] = []
        """The workers' weights, where an engine has them within reach and the scheme is a scaled movement: a commit is then
        the weights themselves, and one pass makes the new center, the new anchor and the new weights of them."""
        self.replies = Replies(self, workers)
        self._held, self._drops_late = scheme.held, scheme.late == "drop"
        self._length = 0 if is_shared(scheme) else start.numel()
        # The next state is checked in the pass that writes it, and not flipped to where it is not finite; the mean of a
        # round of gradients, before the optimiser sees it. A gradient that steps alone must be checked on arrival, and
        # what waits in a round while its worker goes on: that cannot be taken back from it later.
        self._checks_late = scheme.held if self.round.gathers else optimizer is None
        twins = alone and scheme.elementwise and scheme.answers == "center"
        self.twins = twins and bool(self.answers)
        """Whether a lone commit's reply is written in the same pass as the value."""
        self._scratch: Vector | None = None
        self.stepped = False
        """Whether the update that is being made has moved the center's optimiser."""
        self._optimizer_ahead = False
        """Whether the optimiser has made a step that the value has not, since that would not have been finite."""

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
        """Number of times that the two buffers have changed places."""
        return int(self._states.control[0])

    @property
    def scratch(self) -> Vector:
        """A vector to compute in, as long as the value and of its type; made when it is first needed."""
        if self._scratch is None:
            self._scratch = torch.empty_like(self.value)
        return self._scratch

    def last(self, worker: int) -> int:
        """Return the sequence of the worker's last applied commit."""
        return self.state.last(worker)

    @property
    def working(self) -> list[int]:
        """Live workers that have something to do, or will have once they are answered."""
        owed = self.replies.owed
        return sorted(w for w in self.live if self.leases.held(w) or (w in owed and self.leases.remain(w)))

    @property
    def progress(self) -> float:
        """Share of the run's mini-batches that have been used."""
        return self.leases.used / self.leases.total

    @property
    def without_state(self) -> list[int]:
        """Workers with applied commits whose private state after the last of them is not known here."""
        with_one = (worker for worker, state in self.private.states.items() if state)
        committed = (worker for worker in range(self.workers) if self.last(worker))
        return sorted(set(committed).difference(with_one)) if self.private.are_kept else []

    @property
    def may_bring(self) -> list[int]:
        """Those of them that have not said that they cannot bring it."""
        return [worker for worker in self.without_state if worker not in self.private.states]

    def hands_state(self, worker: int) -> bool | None:
        """Return whether a worker that joins gets a predecessor's private state; None where there was none to have."""
        return worker in self.private.restored if self.private.are_kept and self.last(worker) else None

    def part(self, part: int) -> tuple[int, int]:
        """Return the first element of a fragment and the one behind its last."""
        length, parts = self.state.value.numel(), self.scheme.parts
        return length * part // parts, length * (part + 1) // parts

    # -- what workers do ------------------------------------------------------------------------------------

    def join(self, worker: int, incarnation: int = 0) -> list[Reply]:
        """Let a worker, or the replacement of a lost one, begin."""
        self._check_rank(worker)
        self.ledger.arrivals += 1
        self.came(worker, self.ledger.arrivals, incarnation)
        # A newcomer does not hold back those who went on without it.
        others = [self.ledger.commits[k] for k in self.working if k != worker] if self.clock else []
        self.ledger.joins(worker, incarnation, min(others, default=0))
        self.live.add(worker)
        self.leases.welcome(worker)
        self.leases.give_back(worker, keep=self.round.batches(worker))
        self.replies.wake()
        # A worker that gets its predecessor's state begins with the reply to the last commit, where that was its own.
        self.replies.joins(worker, incarnation, own=self.scheme.answers == "own" and worker in self.private.restored)
        if self._held and self.round.of(worker):
            # Its predecessor's commit waits in the round: it counts, and the newcomer begins after it.
            return []
        return self._release()

    def leave(self, worker: int) -> list[Reply]:
        """Let a worker go that will not be replaced: nobody waits for it, others do its rows."""
        self._check_rank(worker)
        self.ledger.arrivals += 1
        self.came(worker, self.ledger.arrivals, None)
        self.live.discard(worker)
        self.replies.wake()
        self.leases.abandon(worker, keep=self.round.batches(worker))
        self.replies.leaves(worker)
        return self._advance()

    def receive(self, commit: Commit) -> list[Reply]:
        """Take one commit: exactly once, only if it is sound, and apply the round that it completes."""
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
            # It came before; or its worker was replaced or given up while it was on its way, and others do its rows already.
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
        """Return whether it came before: it was applied or rejected, or waits in the round."""
        if commit.sequence <= self.state.last(commit.worker) or self.ledger.is_rejected(commit):
            return True
        return bool(self.round.commits) and self.round.holds(commit)

    # -- the round ------------------------------------------------------------------------------------------

    def _advance(self) -> list[Reply]:
        """Apply the round if it is complete, and release what is owed."""
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
        """Refuse those of a round that are not finite (all, if it is only their sum); the others stay in the round."""
        bad = [c for c in commits if self.homes or not self._is_finite(c)] or commits
        self.round.put_back(c for c in commits if not any(c is b for b in bad))
        return self._reject(bad, late=False)

    def _apply(self, commits: list[Commit]) -> bool:
        """Write the next state and flip to it; return False, without a flip, where a commit turns out not to be finite."""
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
        """Drop or refuse commits: the center is untouched, the rows are done again from the center as it is."""
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
                # Nobody waits for its reply; a replacement has leases of its own, or will have them.
                self.leases.give_back(worker, keep=tuple(set(self.leases.held(worker)).difference(commit.batches)))
                continue
            self.leases.give_back(worker, keep=self.round.batches(worker))
            self.ledger.rejected[worker] = commit.sequence
            self.replies.rejects(commit)
        self.replies.wake()
        replies = self._release()
        # They hold their rows again, and the others of the round wait for them; but not for those that are gone.
        return replies + self._advance() if self.round.is_complete(self.live, self.leases) else replies

    def _diverge(self, worker: int) -> None:
        name = name_of(self.scheme)
        other = "" if name == "agn" else f", or choose a scheme that normalises its commits (agn) instead of {name}"
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
        """Return whether a run could continue from here: not once it has diverged and there was no way back."""
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
        """Return all that a model is made of: ``value``, ``buffers`` and ``integers``; not to be written to."""
        buffers, integers = self.state.buffers, self.state.integers
        value = self.value
        if self.remote is not None:
            value = self.remote.gather(CenterSnapshot(self.numbers(), value, buffers, integers)).value
        return {"value": value, "buffers": buffers, "integers": integers}

    def reunite(self) -> None:
        """Take in what other processes hold, once nobody works any more."""
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
        """Return the plain numbers of a snapshot; ``durable``: and who is present and is owed what. With the vectors, that is
        the center as it is to the last bit. Of commits that wait in a round only the rows are known: a worker that waits for
        its reply sends its own again, and those of one that has gone on are done again."""
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
        return Presence(
            live=sorted(self.live),
            incarnations=list(self.ledger.incarnations),
            refusals=list(self.ledger.refusals),
            rejected=list(self.ledger.rejected),
            gone_on=[] if self._held else [(commit.worker, commit.batches) for commit in self.round.commits],
            forgotten=[commit.arrived for commit in self.round.commits],
            **self.replies.presence(),  # type: ignore[arg-type]
        )

    def restore(self, snapshot: CenterSnapshot) -> None:
        """Continue from a snapshot. What was leased is done again; but where the snapshot knows who was present, all goes on as
        if nothing had happened."""
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
