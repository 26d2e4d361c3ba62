"""The vector engine with its center in sight: what it is after each update, and at which virtual second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import paragrad as pg
from paragrad.config.options import APART
from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.learners.learner import Learner
from paragrad.rundir.session import Session

Look: TypeAlias = Callable[[Center, float], bool | None]
"""Called with the center and the virtual second; True asks the run to stop."""


@dataclass(frozen=True)
class Watched(pg.Vector):
    """``pg.Vector`` that shows the center after each update. Looking takes no virtual time and changes nothing.

    Unlike ``pg.Run(validate_every=1)``, what is looked at is up to the benchmark, and is no part of the record.
    """

    look: Look = field(default=lambda center, seconds: None, metadata={APART: True})

    name = "vector"

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        """Train; the center is looked at once for each update, whatever number of commits it was made of."""
        attach = session.attach

        def watch(center: Center) -> None:
            attach(center)
            told = center.applied
            seen = center.clock

            def applied(commit: Any) -> None:
                nonlocal seen
                told(commit)
                if center.clock != seen:
                    seen = center.clock
                    if self.look(center, session.seconds):
                        session.stop("callback")

            center.applied = applied

        session.attach = watch  # type: ignore[method-assign]
        return super().run(job, session, learner)
