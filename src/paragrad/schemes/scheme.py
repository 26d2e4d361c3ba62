"""What a scheme is: how workers and the center cooperate, as algebra on one flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from paragrad.core.replica import Replica
from paragrad.errors import UsageError
from paragrad.types import CenterView, Commit, Reply, SchemePlan, Vector


@dataclass(frozen=True)
class Scheme:
    """One round trip between a worker and the center; subclass it and write ``apply`` or ``scale``.

    A worker runs a window of local steps and commits; the center gathers commits until there is a quorum, applies them, ticks
    its clock and replies; the worker adopts the reply. Everything has a default, so that a scheme says only what is its own.

    A declaration is fixed for most schemes (``held = False`` in the class body) and depends on the fields for some (a
    property). schemes/traits.py has what follows from the declarations.
    """

    window: int = 1
    """Local steps before a commit."""
    bound: int | None = field(default=None, kw_only=True)
    """Asynchronous schemes: how many commits a worker may be ahead of the slowest (SSP; Ho et al. 2013)."""
    overlap: int = field(default=0, kw_only=True)
    """1: a worker computes its next window, from its own weights, while its commit is in flight; commits are then 2n - 1
    updates stale on average instead of n - 1."""

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
        if self.overlap and (why := overlap_obstacle(self)) is not None:
            raise UsageError(f"{type(self).__name__} takes no overlap here: {why}. Leave it out.")

    # -- declarations: what is exchanged --------------------------------------------------------------------

    @property
    def ships(self) -> Literal["movement", "gradient", "weights"]:
        """What a commit is; a gradient is taken at the anchor, and the center holds the optimiser."""
        return "movement"

    @property
    def sends(self) -> tuple[str, ...]:
        """Names of further vectors in a commit; ``commit`` then returns (value, *further)."""
        return ()

    @property
    def parts(self) -> int:
        """Number of fragments of the vector, committed in turn."""
        return 1

    @property
    def answers(self) -> Literal["center", "own", "remembered"]:
        """What a worker is given: the center; an answer of its own, of which ``apply`` returns a list, one per commit; or the
        center, which stays in ``center.handed[k]`` until the next reply."""
        return "center"

    @property
    def center_slots(self) -> tuple[str, ...]:
        """Vectors that the center keeps for the scheme, zero at the start."""
        return ()

    @property
    def worker_slots(self) -> tuple[str, ...]:
        """Vectors that each worker keeps for the scheme, zero at the start."""
        return ()

    @property
    def elementwise(self) -> bool:
        """``commit`` and ``apply`` work element by element, so that they may be run in blocks that fit a cache, or in slices by
        several processes. ``center.step`` counts as such: the optimiser is asked itself."""
        return False

    # -- declarations: when, and from where -----------------------------------------------------------------

    @property
    def held(self) -> bool:
        """A worker waits until its round has been applied."""
        return True

    @property
    def late(self) -> Literal["apply", "drop"]:
        """What happens to a commit based on an older clock."""
        return "apply"

    @property
    def starts(self) -> Literal["center", "own", "shared"]:
        """Where a worker's weights begin: as a copy of the center, at a random point of its own; "shared": they *are* the
        center, without a lock (engines with shared memory only)."""
        return "center"

    @property
    def pulls(self) -> int | Literal["commit"] | None:
        """Further pulls of the center into ``me.center``: just before every ``commit``; or after every so many of a worker's
        steps, inside a window too (see ``pulled``)."""
        return None

    @property
    def early(self) -> Literal["step", "queue"] | None:
        """Ask ``go_on`` after each local step; "queue": it reads ``me.busy``, whether the center has a queue, which a worker on
        another machine cannot see."""
        return None

    @property
    def plain_sgd(self) -> bool:
        """The equation is one of plain SGD: any other torch optimiser is refused."""
        return False

    @property
    def carries(self) -> Literal[True] | str:
        """True: ``adopt`` keeps what was moved since ``me.at_send``, so that a worker may go on while its commit is in flight.
        A text: the reason why not."""
        if type(self).adopt is Scheme.adopt:
            return True
        return "its adopt() does not carry what was moved in flight (where it does, declare carries = True)"

    @property
    def adopts_from(self) -> tuple[str, ...]:
        """Vectors of ``me`` that ``adopt`` needs, besides the slots: checkpoints keep them, as they are when a commit leaves.
        By default all that there are, where a scheme has an ``adopt`` of its own."""
        own = type(self).adopt is not Scheme.adopt and self.starts != "shared"
        return ("local", "sent", "center") if own else ("local",) if self.overlap else ()

    def warnings(self, plan: SchemePlan) -> list[str]:
        """Return what is known to go wrong in such a run, each with the value that holds."""
        return []

    # -- the worker's side ----------------------------------------------------------------------------------

    def begin(self, me: Replica) -> None:
        """Prepare a window."""

    def pulled(self, me: Replica) -> None:
        """Continue from the center that was pulled inside a window into ``me.center``; set aside what was moved so far."""
        raise NotImplementedError(f"{type(self).__name__} pulls inside a window, so it must write pulled().")

    def go_on(self, me: Replica) -> bool:
        """Return whether the window goes on after the step just made."""
        return True

    def commit(self, me: Replica) -> Vector | tuple[Vector, ...]:
        """Return what to send; may change ``me.slots``, nothing else."""
        return me.gradient if self.ships == "gradient" else me.movement()

    def adopt(self, me: Replica, reply: Reply) -> bool | None:
        """Make something of the reply; return False where it was ignored (the window then keeps its version)."""
        if me.at_send is None:
            if not reply.placed:
                me.local = reply.value
        else:
            torch.add(reply.value, me.local - me.at_send, out=me.local)
        me.anchor = me.center = reply.value
        return None

    # -- the center's side ----------------------------------------------------------------------------------

    def quorum(self, workers: int) -> int:
        """Return how many commits the center gathers before it applies them: 1 is asynchronous, n synchronous."""
        return 1

    def steps(self, center: CenterView, worker: int) -> int:
        """Return the length of a worker's next window, at most ``window``; 0: it waits until the center has moved on."""
        return self.window

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector | list[Vector]:
        """Change the center by a round of commits; return ``center.value``, or one answer for each commit."""
        for commit in commits:
            center.add(commit.value, self.scale(commit))
        return center.value

    def scale(self, commit: Commit) -> float:
        """Return how much of a movement the center takes, for schemes that are ``c <- c + scale * d`` and no more."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what the center does with a commit: write apply() or scale()."
        )


def overlap_obstacle(scheme: Scheme) -> str | None:
    """Return why a window cannot be computed while the commit before it is in flight; None where it can."""
    carries = scheme.carries
    if carries is not True and type(scheme).carries is not Scheme.carries:
        return carries
    reasons = [
        (scheme.starts == "shared", "its workers' weights are the center itself, so that nothing is ever in flight"),
        (scheme.early, "it looks at its worker after each step, and a window in flight is made in one go"),
        (isinstance(scheme.pulls, int), "its worker pulls the center inside a window, and the answer would come on top"),
        (scheme.pulls == "commit", "its worker continues from the center that it pulled before the commit"),
        (
            scheme.answers == "remembered",
            "the center remembers what a worker was given last; a window in flight began before that",
        ),
        (scheme.late == "drop", "late commits are dropped, and one whose window began in flight is always late"),
        (carries is not True, str(carries)),
    ]
    return next((why for holds, why in reasons if holds), None)
