"""AsyncDiLoCo: long local windows without waiting, and an outer Nesterov step with delayed momentum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, SchemePlan, Vector

LEAST = 1 / 3
"""Least share of a worker's movement that the center must take; with less, a run hardly learns."""
FEW = 4
"""Windows per worker below which a shorter window is advised."""
BUILT_UP = 100
"""Rounds after which the outer momentum has reached its full size."""


@dataclass(frozen=True)
class AsyncDiLoCo(Scheme):
    """Δ = a - w;  c <- c - ε (Δ / N + γ β v), γ the constant ``c``;  at every N-th commit first v <- β v + ΣΔ / N, and
    γ = 1 - c (N - 1), so that N commits together are one Nesterov step on their mean;  the worker takes c.

    Liu et al., *Asynchronous Local-SGD Training for Language Modeling* (2024), arXiv:2401.09135, with its DyLU: the window of a
    worker is ⌊H · its speed / highest speed⌋, so that all commit equally often. AsyncDiLoCo(delay=1) of one worker is DiLoCo.

    Choose it if DiLoCo would wait for slow workers; take ``dylu=True`` if they stay slow.
    Not with delay=1 and many workers: momentum on stale movements overshoots, and a warning names the limit.
    """

    window: int = 50
    outer_lr: float = 0.07
    """Outer learning rate ε; a tenth of the synchronous one."""
    outer_momentum: float = 0.9
    """Outer Nesterov momentum β."""
    delay: int | None = None
    """Commits N between two updates of the momentum; by default the number of workers."""
    c: float = 0.0
    """Share of the momentum that each commit in between applies, up to 1/N."""
    dylu: bool = False
    """Shorten the windows of slow workers."""

    center_slots = ("velocity", "gathered")
    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.outer_lr > 0 or not 0 <= self.outer_momentum < 1:
            raise UsageError(
                f"outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum}, but AsyncDiLoCo needs outer_lr > 0 and "
                "0 <= outer_momentum < 1."
            )
        if self.delay is not None and self.delay < 1:
            raise UsageError(f"delay={self.delay}, but it must be 1 or more: the momentum is updated at every delay-th commit.")
        if not 0 <= self.c <= 1 / (self.delay or 1):
            raise UsageError(
                f"c={self.c}, but the momentum is distributed with 0 <= c <= 1 / delay = {1 / (self.delay or 1):.3g}."
            )

    def steps(self, center: CenterView, worker: int) -> int:
        speed = center.speeds[worker]
        if not self.dylu or not speed:
            return self.window
        fastest = max(center.speeds[k] for k in (worker, *center.working))
        return max(1, int(self.window * speed / fastest))

    def apply(self, center: CenterView, commits: Sequence[Commit]) -> Vector:
        every, velocity, gathered = self.delay or center.workers, center.slots["velocity"], center.slots["gathered"]
        for count, commit in enumerate(commits, start=center.clock + 1):
            if self.dylu and not commit.seconds > 0:
                raise UsageError("DyLU needs an engine that measures the time of windows: leave dylu=False with this one.")
            gathered.sub_(commit.value)
            share = self.c
            if count % every == 0:
                velocity.mul_(self.outer_momentum).add_(gathered, alpha=1 / every)
                gathered.zero_()
                share = 1 - self.c * (every - 1)
            center.add(share * self.outer_momentum * velocity - commit.value / every, -self.outer_lr)
        return center.value

    def warnings(self, plan: SchemePlan) -> list[str]:
        workers = plan.workers
        messages, every = [], self.delay or workers
        if self.c * every > 1:
            messages.append(
                f"AsyncDiLoCo(c={self.c}) with delay {every} reverses momentum. Take c up to {1 / every:.3g} to distribute it."
            )
        if not self._settles(self.outer_lr, workers, every):
            messages.append(
                f"AsyncDiLoCo with {workers} workers, outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum} and "
                f"delay={every} is unstable in directions in which a window converges. outer_lr below "
                f"{self._limit(workers, every):.2g} is stable, and with delay={workers} outer_lr below "
                f"{self._limit(workers, workers):.2g}."
            )
        taken = self._taken(plan, every)
        if taken < LEAST:
            advised = self._advised(plan)
            shorter = f"window={advised.window} and " if advised.window < self.window else ""
            messages.append(
                f"AsyncDiLoCo with {workers} workers makes {plan.rounds(self.window):.2g} windows per worker in this run: too "
                f"few for its outer momentum, so that the center takes {taken:.0%} of a worker's movement. With {shorter}"
                f"outer_lr={advised.outer_lr:g} it takes all of it."
            )
        return messages

    def _advised(self, plan: SchemePlan) -> AsyncDiLoCo:
        """Return a window and an outer learning rate with which the center takes all of a worker's movement."""
        every = self.delay or plan.workers
        shorter = replace(self, window=max(1, min(self.window, int(plan.steps / FEW))))
        rate = min(shorter.outer_lr / shorter._taken(plan, every), self._limit(plan.workers, every))
        return replace(shorter, outer_lr=float(f"{rate:.2g}"))

    def _taken(self, plan: SchemePlan, every: int) -> float:
        """Return the share of a worker's movement that the center takes by the end, if all workers move alike."""
        commits = max(1, round(min(plan.rounds(self.window), BUILT_UP) * plan.workers))
        center = sum(self._movements(repeat(1.0, commits), self.outer_lr, every))
        return center * plan.workers / commits

    def _limit(self, workers: int, every: int) -> float:
        low, high = 0.0, 2.0 * every
        for _ in range(16):
            lr = (low + high) / 2
            low, high = (lr, high) if self._settles(lr, workers, every) else (low, lr)
        return 0.95 * low

    def _settles(self, lr: float, workers: int, every: int) -> bool:
        """Return whether n equal workers in turn converge, if each window ends in the minimum (0, so that Δ = a)."""
        center, anchors = 1.0, [1.0] * workers
        turns = [count % workers for count in range(1, 300 * (workers + every))]
        for worker, movement in zip(turns, self._movements((anchors[k] for k in turns), lr, every), strict=True):
            center -= movement
            if abs(center) > 1e6:
                return False
            anchors[worker] = center
        return abs(center) < 0.1

    def _movements(self, deltas: Iterable[float], lr: float, every: int) -> Iterator[float]:
        """Yield the movement of the center for each Δ, in one dimension."""
        velocity = gathered = 0.0
        for count, delta in enumerate(deltas, 1):
            gathered, share = gathered + delta, self.c
            if count % every == 0:
                velocity, gathered, share = self.outer_momentum * velocity + gathered / every, 0.0, 1 - self.c * (every - 1)
            yield lr * (share * self.outer_momentum * velocity + delta / every)
