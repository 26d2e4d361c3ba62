"""The base class of schemes: how workers and the center cooperate, as operations on one flat vector."""

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
    """One round trip between a worker and the center; subclass it and define ``apply`` or ``scale``.

    A worker runs a window of local steps and commits. The center collects commits until it has a quorum, applies them, advances
    its clock and replies. The worker adopts the reply. Everything has a default, so that a scheme defines only its differences.

    Most schemes have a fixed declaration (``held = False`` in the class body). If it depends on fields, it is a property.
    schemes/traits.py derives further facts from the declarations.
    """

    window: int = 1
    """Local steps before a commit."""
    bound: int | None = field(default=None, kw_only=True)
    """Asynchronous schemes: number of commits that a worker may be ahead of the slowest (SSP; Ho et al. 2013)."""
    overlap: int = field(default=0, kw_only=True)
    """1: a worker computes its next window from its own weights while its commit is in flight. The mean staleness is then
    2n - 1 instead of n - 1."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UsageError(f"window={self.window}, but a worker makes at least 1 local step before it commits.")
        if self.bound is not None and self.bound < 1:
            raise UsageError(f"bound={self.bound}, but a worker must be allowed to be at least 1 commit ahead.")
        if self.overlap not in (0, 1):
            raise UsageError(
                f"overlap={self.overlap}, but a worker has one commit in flight at a time: take 1, to compute the next window "
                "meanwhile, or 0."
            )
        if self.overlap and (why := overlap_obstacle(self)) is not None:
            raise UsageError(f"{type(self).__name__} cannot use overlap here: {why}. Leave it out.")

    def _check_window_is_1(self) -> None:
        if self.window != 1:
            name = type(self).__name__
            raise UsageError(f"window={self.window}, but {name} exchanges a gradient at every step: leave window at 1.")

    # -- declarations: contents of an exchange ---------------------------------------------------------------

    @property
    def ships(self) -> Literal["movement", "gradient", "weights"]:
        """Value of a commit. A gradient is taken at the anchor, and the center has the optimiser."""
        return "movement"

    @property
    def sends(self) -> tuple[str, ...]:
        """Names of additional vectors in a commit; ``commit`` then returns (value, *additional)."""
        return ()

    @property
    def parts(self) -> int:
        """Number of fragments of the vector that are committed in turn."""
        return 1

    @property
    def answers(self) -> Literal["center", "own", "remembered"]:
        """Answer to a worker: the center; its "own" answer (``apply`` returns a list, one per commit); or the center, which the
        center remembers in ``center.handed[k]`` until the next reply."""
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
        """True if ``commit`` and ``apply`` work element by element, so that they may run in blocks that fit a cache, or in
        slices by several processes. ``center.step`` is allowed: the optimiser declares for itself whether it can."""
        return False

    # -- declarations: order and starting points -------------------------------------------------------------

    @property
    def held(self) -> bool:
        """True if a worker waits until its round has been applied."""
        return True

    @property
    def late(self) -> Literal["apply", "drop"]:
        """Treatment of a commit that is based on an older clock."""
        return "apply"

    @property
    def starts(self) -> Literal["center", "own", "shared"]:
        """Start of a worker's weights: a copy of the center, its own random point, or "shared": they *are* the center, without
        a lock (only on engines with shared memory)."""
        return "center"

    @property
    def pulls(self) -> int | Literal["commit"] | None:
        """Additional pulls of the center into ``me.center``: just before every "commit", or every so many steps of a worker,
        also inside a window (see ``pulled``)."""
        return None

    @property
    def early(self) -> Literal["step", "queue"] | None:
        """ "step": the worker calls ``go_on`` after each local step. "queue": ``go_on`` also reads ``me.busy``, whether commits
        wait at the center, which a worker on another machine cannot see."""
        return None

    @property
    def plain_sgd(self) -> bool:
        """True if the equation is defined for plain SGD; any other optimiser is rejected."""
        return False

    @property
    def carries(self) -> Literal[True] | str:
        """True if ``adopt`` keeps the movement since ``me.at_send``, so that a worker may continue while its commit is in
        flight; otherwise the reason why not."""
        if type(self).adopt is Scheme.adopt:
            return True
        return "its adopt() does not keep movement made in flight (if it does, declare carries = True)"

    @property
    def adopts_from(self) -> tuple[str, ...]:
        """Vectors of ``me`` that ``adopt`` needs besides the slots; checkpoints contain them as of the last commit. By default
        all vectors, if a scheme defines ``adopt``."""
        own = type(self).adopt is not Scheme.adopt and self.starts != "shared"
        return ("local", "sent", "center") if own else ("local",) if self.overlap else ()

    def warnings(self, plan: SchemePlan) -> list[str]:
        """Return known problems of such a run, each with a setting that works."""
        return []

    # -- the worker's side ----------------------------------------------------------------------------------

    def begin(self, me: Replica) -> None:
        """Prepare a window."""

    def pulled(self, me: Replica) -> None:
        """Continue from the center that was pulled inside a window into ``me.center``; keep the movement so far."""
        raise NotImplementedError(f"{type(self).__name__} pulls inside a window, so it must define pulled().")

    def go_on(self, me: Replica) -> bool:
        """Return whether the window continues after the last step."""
        return True

    def commit(self, me: Replica) -> Vector | tuple[Vector, ...]:
        """Return the value to send; it may change ``me.slots`` and nothing else."""
        return me.gradient if self.ships == "gradient" else me.movement()

    def adopt(self, me: Replica, reply: Reply) -> bool | None:
        """Use the reply; return False if it was ignored (the window then keeps its version)."""
        if me.at_send is None:
            if not reply.placed:
                me.local = reply.value
        else:
            torch.add(reply.value, me.local - me.at_send, out=me.local)
        me.anchor = me.center = reply.value
        return None

    # -- the center's side ----------------------------------------------------------------------------------

    def quorum(self, workers: int) -> int:
        """Return the number of commits that the center collects before it applies them: 1 is asynchronous, n synchronous."""
        return 1

    def steps(self, center: CenterView, worker: int) -> int:
        """Return the length of a worker's next window, at most ``window``; with 0 it waits for the next update."""
        return self.window

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector | list[Vector]:
        """Update the center with a round of commits; return ``center.value``, or one answer per commit."""
        for commit in commits:
            center.add(commit.value, self.scale(commit))
        return center.value

    def scale(self, commit: Commit) -> float:
        """Return the factor of a movement, for schemes that are just ``c <- c + scale * d``."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define how the center applies a commit: write apply() or scale()."
        )


@dataclass(frozen=True)
class Synchronous(Scheme):
    """Base class of schemes whose rounds wait for all workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound is not None:
            raise UsageError(f"{type(self).__name__} is synchronous: a bound on staleness has no meaning, leave it out.")

    def quorum(self, workers: int) -> int:
        return workers


def overlap_obstacle(scheme: Scheme) -> str | None:
    """Return why a window cannot be computed while the previous commit is in flight; None if it can."""
    carries = scheme.carries
    if carries is not True and type(scheme).carries is not Scheme.carries:
        return carries
    reasons = [
        (scheme.starts == "shared", "the weights of its workers are the center itself, so that nothing is ever in flight"),
        (scheme.early, "it decides after each step, but a window in flight is computed as a whole"),
        (isinstance(scheme.pulls, int), "its worker pulls the center inside a window, and the answer would be added to that"),
        (scheme.pulls == "commit", "its worker continues from the center that it pulled before the commit"),
        (scheme.answers == "remembered", "the center remembers its last answer, but a window in flight began before that"),
        (scheme.late == "drop", "late commits are dropped, and a commit whose window began in flight is always late"),
        (carries is not True, str(carries)),
    ]
    return next((why for holds, why in reasons if holds), None)
