"""AsyncDiLoCo: long local windows without waiting, and an outer Nesterov step whose momentum comes delayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paragrad.errors import UsageError
from paragrad.schemes.scheme import Scheme
from paragrad.types import CenterView, Commit, SchemePlan, Vector

LEAST = 1 / 3
"""The share of a worker's movement that the center must take, or a run hardly begins to learn."""
FEW = 4
"""Windows per worker below which shorter ones are advised."""
BUILT_UP = 100
"""Rounds after which the outer momentum is as large as it becomes."""


@dataclass(frozen=True)
class AsyncDiLoCo(Scheme):
    """Δ = a - w;  c <- c - ε (Δ / N + γ β v), γ the constant ``c``;  at every N-th commit v <- β v + ΣΔ / N before, and
    γ = 1 - c (N - 1), so that N commits together are one Nesterov step on their mean;  the worker takes c.

    Liu et al., *Asynchronous Local-SGD Training for Language Modeling* (2024), arXiv:2401.09135, with its DyLU: a worker's
    window is ⌊H · its speed / the highest⌋, so that all commit equally often. AsyncDiLoCo(delay=1) of one worker is DiLoCo.

    Choose it where DiLoCo would wait for slow workers; take ``dylu=True`` if they stay slow.
    Not with delay=1 and many workers: momentum on stale movements overshoots, and ``warnings`` says from where on.
    """

    window: int = 50
    outer_lr: float = 0.07
    """The outer learning rate ε; a tenth of the synchronous one."""
    outer_momentum: float = 0.9
    """The outer Nesterov momentum β."""
    delay: int | None = None
    """Commits N between two updates of the momentum; as many as there are workers if not given."""
    c: float = 0.0
    """How much of the momentum each commit in between applies, up to 1/N."""
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
            raise UsageError(f"delay={self.delay}, but the momentum is updated at every delay-th commit: take 1 or more.")
        if not 0 <= self.c <= 1 / (self.delay or 1):
            raise UsageError(
                f"c={self.c}, but the momentum is shared out by 0 <= c <= 1 / delay = {1 / (self.delay or 1):.3g}."
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
                raise UsageError("DyLU needs an engine that measures how long a window takes: leave dylu=False with this one.")
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
        said, every = [], self.delay or workers
        if self.c * every > 1:
            said.append(
                f"AsyncDiLoCo(c={self.c}) with delay {every} takes momentum back: c up to {1 / every:.3g} shares it out."
            )
        if not self._settles(self.outer_lr, workers, every):
            said.append(
                f"AsyncDiLoCo with {workers} workers, outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum} and "
                f"delay={every} is unstable in directions in which a window comes to rest. outer_lr below "
                f"{self._limit(workers, every):.2g} holds, and with delay={workers} outer_lr below "
                f"{self._limit(workers, workers):.2g}."
            )
        taken = self._taken(plan, every)
        if taken < LEAST:
            advised = self._advised(plan)
            shorter = f"window={advised.window} and " if advised.window < self.window else ""
            said.append(
                f"AsyncDiLoCo with {workers} workers makes {plan.rounds(self.window):.2g} windows per worker in this run: too "
                f"few for its outer momentum, so that the center takes {taken:.0%} of a worker's movement. {shorter}"
                f"outer_lr={advised.outer_lr:g} takes all of it."
            )
        return said

    def _advised(self, plan: SchemePlan) -> AsyncDiLoCo:
        """The same with windows and an outer rate by which the center takes all of a worker's movement in such a run."""
        every = self.delay or plan.workers
        shorter = replace(self, window=max(1, min(self.window, int(plan.steps / FEW))))
        rate = min(shorter.outer_lr / shorter._taken(plan, every), self._limit(plan.workers, every))
        return replace(shorter, outer_lr=float(f"{rate:.2g}"))

    def _taken(self, plan: SchemePlan, every: int) -> float:
        """The share of a worker's movement that the center has made in the end, where all of them move alike."""
        rounds = min(plan.rounds(self.window), BUILT_UP)
        center, velocity, gathered = 0.0, 0.0, 0.0
        commits = max(1, round(rounds * plan.workers))
        for count in range(1, commits + 1):
            gathered, share = gathered + 1.0, self.c
            if count % every == 0:
                velocity, gathered, share = self.outer_momentum * velocity + gathered / every, 0.0, 1 - self.c * (every - 1)
            center += self.outer_lr * (share * self.outer_momentum * velocity + 1 / every)
        return center * plan.workers / commits

    def _limit(self, workers: int, every: int) -> float:
        low, high = 0.0, 2.0 * every
        for _ in range(16):
            lr = (low + high) / 2
            low, high = (lr, high) if self._settles(lr, workers, every) else (low, lr)
        return 0.95 * low

    def _settles(self, lr: float, workers: int, every: int) -> bool:
        """Whether n equal workers in turn come to rest, if each window ends in the minimum (0, so that Δ = a)."""
        center, velocity, gathered, anchors = 1.0, 0.0, 0.0, [1.0] * workers
        for count in range(1, 300 * (workers + every)):
            delta, share = anchors[count % workers], self.c
            gathered += delta
            if count % every == 0:
                velocity, gathered, share = self.outer_momentum * velocity + gathered / every, 0.0, 1 - self.c * (every - 1)
            center -= lr * (share * self.outer_momentum * velocity + delta / every)
            if abs(center) > 1e6:
                return False
            anchors[count % workers] = center
        return abs(center) < 0.1
