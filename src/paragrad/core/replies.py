"""The replies that the center owes its workers, and the last reply to each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paragrad.core.snapshot import OwedReply, Presence
from paragrad.core.view import View
from paragrad.schemes.scheme import Scheme
from paragrad.schemes.traits import is_ahead
from paragrad.types import Batches, Commit, Reply

if TYPE_CHECKING:
    from paragrad.core.center import Center


class Replies:
    """Replies that are owed. Each is released together with the lease of the worker's next window."""

    def __init__(self, center: Center, workers: int) -> None:
        scheme = center.scheme
        self._center = center
        # Read at every commit: a plain attribute takes a tenth of the time of the scheme's declaration.
        self._overlap = bool(scheme.overlap)
        self._aligned = scheme.held and center.round.gathers
        self._bounded = scheme.bound is not None
        self._may_differ = type(scheme).steps is not Scheme.steps
        self.owed: dict[int, OwedReply] = {}
        self.resting: dict[int, OwedReply] = {}
        """Owed to workers that have no mini-batches, unless another worker leaves and its rows become free."""
        self.given: list[OwedReply | None] = [None] * workers
        """The last reply to each worker, in case it asks again."""
        self.looked_ahead = [False] * workers
        """With overlap, per worker: True if its last reply leased the windows of two rounds; the second may be empty."""
        self._sitting_at_restore: set[int] = set()

    def joins(self, worker: int, incarnation: int, *, own: bool) -> None:
        """Owe a joining worker its first reply."""
        clock, before = self._center.clock, self.owed.get(worker)
        self.looked_ahead[worker] = False
        sits_out = worker in self._sitting_at_restore or (before is not None and before.sits_out == clock)
        self._sitting_at_restore.discard(worker)
        owed = self.owed[worker] = OwedReply(sequence=-1 - incarnation, own=own, version=clock)
        if sits_out:
            # Its predecessor had no mini-batches in this round. It gets none either, or it would commit rows of the next round.
            owed.sits_out = clock

    def leaves(self, worker: int) -> None:
        """Drop the reply to a worker that left. Workers without mini-batches in this round may get its rows."""
        self.owed.pop(worker, None)
        for owed in self.owed.values():
            owed.sits_out = None

    def rejects(self, commit: Commit) -> None:
        """Owe a worker whose commit was rejected the center to begin again from."""
        self.looked_ahead[commit.worker] = False
        self.owed[commit.worker] = OwedReply(commit.sequence, own=False, version=self._center.clock, applied=False)

    def applied(self, worker: int) -> None:
        """Set the version of an owed reply after its commit was applied."""
        center, owed = self._center, self.owed.get(worker)
        if owed is not None:
            # A worker that has just replaced a lost one begins from the center.
            owed.own = bool(center.answers) and owed.sequence >= 0
            owed.placed = owed.own and bool(center.homes)
            owed.version = center.clock

    def wake(self) -> None:
        """Owe the resting workers their replies again: rows became free, or none are left at all."""
        self.owed |= self.resting
        self.resting.clear()

    def sitting(self) -> list[int]:
        """Return the workers without mini-batches in the present round."""
        return [worker for worker, owed in self.owed.items() if owed.sits_out == self._center.clock]

    def release(self) -> tuple[list[Reply], list[int]]:
        """Return the replies that are due, and the workers that end with them."""
        center = self._center
        replies: list[Reply] = []
        done: list[int] = []
        clock, leases, blocked = center.state.clock, center.leases, center.round.blocked
        for worker in sorted(self.owed):
            if worker in blocked or self.owed[worker].sits_out == clock:
                continue
            if self._bounded and is_ahead(center.scheme, self._view(), worker):
                continue
            steps = self.steps(worker)
            if not steps:
                continue
            ahead = leases.count(worker) - center.round.count(worker)
            batches = self._take(worker, steps, ahead)
            if not batches and not ahead and leases.used < leases.total:
                # No mini-batches now. In rounds, the worker skips this one; otherwise it stays, in case rows become free.
                if self._aligned:
                    self.owed[worker].sits_out = clock
                else:
                    self.resting[worker] = self.owed.pop(worker)
                continue
            reply = self._reply(worker, self.owed.pop(worker), batches=batches, steps=steps)
            replies.append(reply)
            if reply.done:
                done.append(worker)
        return replies, done

    def let_sitting_work(self) -> bool:
        """Let workers that skip a round work if no other worker has mini-batches in it. Return whether there are any."""
        center = self._center
        sitting = [o for w, o in self.owed.items() if o.sits_out == center.clock and center.leases.remain(w)]
        if not sitting or any(center.leases.held(worker) for worker in center.live):
            return False
        for owed in sitting:
            owed.sits_out = None
        return True

    def again(self, commit: Commit) -> list[Reply]:
        """Answer a repeated commit: return its last reply with the same leases, or nothing if the reply is still owed."""
        center, worker, given = self._center, commit.worker, self.given[commit.worker]
        if worker in self.owed or worker in self.resting or (given is not None and given.sequence != commit.sequence):
            return []
        waiting = center.round.batches(worker)
        held = tuple(position for position in center.leases.held(worker) if position not in waiting)
        # The first reply may still arrive, so the center repeats it if it keeps its answers. After a restore from a
        # checkpoint it does not know which reply that was.
        again = bool(center.answers) and given is not None
        owed = given or OwedReply(commit.sequence, own=center.scheme.answers == "own", version=center.clock)
        return [self._reply(worker, owed, batches=held, steps=self.steps(worker), again=again)]

    def _take(self, worker: int, steps: int, ahead: int) -> Batches:
        """Lease a worker's next window; with overlap, also the one after it."""
        leases = self._center.leases
        if not self._overlap:
            return leases.take(worker, max(0, steps - ahead), aligned=self._aligned)
        if not self._aligned:
            return leases.take(worker, max(0, 2 * steps - ahead))
        # With rounds, an empty window at the end of an epoch counts: the worker skips that round.
        looked, self.looked_ahead[worker] = self.looked_ahead[worker], True
        if looked and not ahead:
            self.looked_ahead[worker] = False
            return ()
        return leases.take(worker, steps if looked else 2 * steps, aligned=True)

    def steps(self, worker: int) -> int:
        """Return the length of a worker's next window; 0: the worker waits."""
        scheme = self._center.scheme
        return min(scheme.steps(self._view(), worker), scheme.window) if self._may_differ else scheme.window

    def _view(self) -> View:
        center = self._center
        return View(center, center.state, center.state, 0, 0)

    def _reply(self, worker: int, owed: OwedReply, *, batches: Batches, steps: int, again: bool = False) -> Reply:
        center, state, answers = self._center, self._center.state, self._center.answers
        own = again or (owed.own and (owed.version == state.clock or center.scheme.answers == "own"))
        if answers and not own:
            answers[worker].copy_(state.value)
            if center.scheme.answers == "own":
                center.private.keep(worker, None)  # it is useless without the reply that it belongs to
            if center.remote is not None:
                center.remote.hand(worker)
        version = owed.version if own else state.clock
        last = max([state.last(worker), *(commit.sequence for commit in center.round.of(worker))])
        progress = center.progress if owed.progress is None else owed.progress
        placed = own and owed.placed
        # Kept to repeat the reply; ``placed`` is then False, because only the row of answers still has the value.
        owed.own, owed.version, owed.placed, owed.sits_out, owed.progress = own, version, False, None, progress
        self.given[worker] = owed
        joins = owed.sequence < 0
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
            done=not batches and center.leases.count(worker) <= center.round.count(worker),
            progress=progress,
            buffers=state.buffers,
            integers=state.integers,
            residual=center.private.residual(worker, center.round.of(worker)) if joins else None,
            state=center.private.restored.get(worker) if joins else None,
        )

    def restore(self, presence: Presence | None, sitting: list[int]) -> None:
        """Continue from a snapshot."""
        if presence is None:
            self._sitting_at_restore = set(sitting)
            return
        self.owed, self.resting, self.given = dict(presence.owed), dict(presence.resting), list(presence.given)
        self.looked_ahead = list(presence.looked_ahead)
        self._sitting_at_restore = set()
