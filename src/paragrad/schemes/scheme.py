"""What a scheme is: how workers and the center cooperate, as algebra on one flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from paragrad.errors import UsageError
from paragrad.replica import Replica
from paragrad.types import CenterView, Commit, Reply, Vector


@dataclass(frozen=True)
class Scheme:
    """One round trip between a worker and the center; subclass it and write ``apply``.

    A worker runs a window of local steps, commits; the center gathers commits until there is a quorum,
    applies them, ticks its clock, replies; the worker adopts the reply. Every hook has a default, so
    that a scheme says only what is its own.
    """

    window: int = 1
    """Local steps before a commit."""
    bound: int | None = field(default=None, kw_only=True)
    """Asynchronous schemes: how many commits a worker may be ahead of the slowest (SSP; Ho et al. 2013)."""
    overlap: int = field(default=0, kw_only=True)
    """1: a worker computes its next window, from its own weights, while its commit is in flight; commits are then 2n - 1
    updates stale on average instead of n - 1."""

    # What follows is fixed for most schemes (``held = False`` in the class body) and depends on the
    # fields for some (a property): both override these.

    @property
    def ships(self) -> Literal["movement", "gradient", "weights"]:
        """What a commit is; a gradient is taken at the anchor, and the center holds the optimiser."""
        return "movement"

    @property
    def sends(self) -> tuple[str, ...]:
        """Names of further vectors in a commit; ``commit`` then returns (value, *further)."""
        return ()

    @property
    def plain_sgd(self) -> bool:
        """The equation is one of plain SGD: a torch optimiser that is anything else is refused."""
        return False

    @property
    def fresh(self) -> bool:
        """Pull once more, into ``me.center``, just before ``commit``."""
        return False

    @property
    def held(self) -> bool:
        """A worker waits until its round has been applied."""
        return True

    @property
    def late(self) -> Literal["apply", "drop"]:
        """What happens to a commit based on an older clock."""
        return "apply"

    @property
    def additive(self) -> bool:
        """Values may be summed and compressed."""
        return True

    @property
    def answers(self) -> Literal["center", "own"]:
        """Whether ``apply`` returns the center for all, or a list with an answer of its own for each commit."""
        return "center"

    @property
    def remembers(self) -> bool:
        """``center.handed[k]`` is what worker k was last given."""
        return False

    @property
    def elementwise(self) -> bool:
        """``commit`` and ``apply`` work element by element, so that they may be run in blocks that fit a cache, or in slices by
        several processes; ``center.step`` counts as such, for the optimiser is asked itself."""
        return False

    @property
    def aliased(self) -> bool:
        """The workers' weights *are* the center, without a lock; engines with shared memory only."""
        return False

    @property
    def apart(self) -> bool:
        """Each worker begins from a random point of its own instead of from the center."""
        return False

    @property
    def center_slots(self) -> tuple[str, ...]:
        """Vectors that the center keeps for the scheme, zero at the start."""
        return ()

    @property
    def worker_slots(self) -> tuple[str, ...]:
        """Vectors that each worker keeps for the scheme, zero at the start."""
        return ()

    @property
    def parts(self) -> int:
        """Fragments of the vector, committed in turn."""
        return 1

    @property
    def carries(self) -> bool:
        """``adopt`` keeps what was moved since ``me.at_send``: a worker may go on while its commit is in flight."""
        return type(self).adopt is Scheme.adopt

    @property
    def why_no_overlap(self) -> str | None:
        """Why a window cannot be computed while the commit before it is in flight; None where it can."""
        reasons = [
            (self.aliased, "its workers' weights are the center itself, so that nothing is ever in flight"),
            (self.early, "it looks at its worker after each step, and a window in flight is made in one go"),
            (self.fetch is not None, "its worker pulls the center inside a window, and the answer would come on top"),
            (self.fresh, "its worker goes on from the center that it pulled before the commit, and not from where it is"),
            (self.remembers, "the center remembers what a worker was given last, and a window in flight began before that"),
            (self.late == "drop", "late commits are dropped, and one whose window began in flight is always late"),
            (not self.carries, "its adopt() does not carry what was moved in flight (where it does, say carries = True)"),
        ]
        return next((why for holds, why in reasons if holds), None)

    @property
    def fetch(self) -> int | None:
        """Pull the center after every so many of a worker's steps, inside a window too (see ``pulled``); None: never."""
        return None

    def pulled(self, me: Replica) -> None:
        """The center was pulled inside a window, into ``me.center``: set aside what was moved so far, and go on from it."""
        raise NotImplementedError(f"{type(self).__name__} fetches inside a window, so it must write pulled().")

    @property
    def early(self) -> bool:
        """Ask ``go_on`` after each local step."""
        return False

    @property
    def sees_queue(self) -> bool:
        """``go_on`` looks at ``me.busy``: whether the center has a queue, which a worker on another machine cannot see."""
        return self.early

    def go_on(self, me: Replica) -> bool:
        """Whether the window goes on after the step just made."""
        return True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UsageError(f"window={self.window}, but a worker makes at least 1 local step before it commits.")
        if self.bound is not None and self.bound < 1:
            raise UsageError(f"bound={self.bound}, but a worker must be allowed to be at least 1 commit ahead.")
        if self.overlap not in (0, 1):
            raise UsageError(
                f"overlap={self.overlap}, but a worker has one commit in flight at a time: overlap is 1, the next window is "
                "computed meanwhile, or 0."
            )
        if self.overlap and self.why_no_overlap is not None:
            raise UsageError(f"{type(self).__name__} takes no overlap here: {self.why_no_overlap}. Leave it out.")

    @property
    def name(self) -> str:
        """The scheme's name on the command line."""
        return type(self).__name__.lower()

    def quorum(self, workers: int) -> int:
        """How many commits the center gathers before it applies them: 1 is asynchronous, n synchronous."""
        return 1

    def steps(self, center: CenterView, worker: int) -> int:
        """The length of a worker's next window, at most ``window``."""
        return self.window

    def waits(self, center: CenterView, worker: int) -> bool:
        """Whether this worker's answer is withheld until the center has moved on."""
        if self.bound is None:
            return False
        counts = center.counts
        slowest = min((counts[k] for k in center.working), default=counts[worker])
        return counts[worker] - slowest > self.bound

    def begin(self, me: Replica) -> None:
        """Before each window."""

    def commit(self, me: Replica) -> Vector | tuple[Vector, ...]:
        """What to send; may change ``me.slots``, nothing else."""
        return me.gradient if self.ships == "gradient" else me.movement()

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector | list[Vector]:
        """Change the center by a round of commits; return ``center.value``, or one answer for each commit."""
        for commit in commits:
            center.add(commit.value, self.scale(commit))
        return center.value

    def scale(self, commit: Commit) -> float:
        """For schemes that are ``c <- c + scale * d`` and no more: how much of a movement the center takes."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what the center does with a commit: write apply() or scale()."
        )

    def adopt(self, me: Replica, reply: Reply) -> bool | None:
        """Make something of the answer; return False where it was ignored (the window then keeps its version)."""
        if me.at_send is None:
            if not reply.placed:
                me.local = reply.value
        else:
            torch.add(reply.value, me.local - me.at_send, out=me.local)
        me.anchor = me.center = reply.value
        return None

    @property
    def is_scaled_movement(self) -> bool:
        """Whether it is ``c <- c + scale * d``, with the worker taking c, and no more: an engine may then do it in one pass."""
        own = ("commit", "apply", "adopt")
        return (
            all(getattr(type(self), name) is getattr(Scheme, name) for name in own)
            and self.ships == "movement"
            and self.held
            and not (self.sends or self.fresh or self.fetch or self.overlap or self.remembers or self.aliased or self.apart)
            and self.parts == 1
        )

    def warnings(self, workers: int) -> list[str]:
        """What is known to go wrong with these numbers, each with the value that would hold."""
        return []
