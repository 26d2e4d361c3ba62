"""``pg.check_engine`` passes the engines that there are, and finds the defect of each engine that has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import paragrad as pg
from paragrad.core.center import Center
from paragrad.core.job import Job
from paragrad.laws import engine as engine_laws
from paragrad.laws.engine import LAWS
from paragrad.laws.scheme import LawBroken
from paragrad.laws.trials import Trials
from paragrad.learners.learner import Learner
from paragrad.rundir.session import Session
from paragrad.types import Commit


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


ENGINES = [
    pg.Local(workers=2, threads=1),
    pg.Vector(workers=3),
    pg.Network(workers=2, here=2, threads=1),
    pg.Network(workers=2, here=2, threads=1, shared=False),
]


@pytest.mark.parametrize("engine", ENGINES, ids=["local", "vector", "network beside", "network away"])
def test_the_engines_obey_the_laws(engine):
    held = pg.check_engine(engine)
    assert len(held) == len(LAWS)
    assert "nan never enters" in held


# -- check_engine can fail ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Defect(pg.Vector):
    """An engine with a hand in its own works."""

    workers: int = 2
    mode: Any = "loop"

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        attach = session.attach

        def tamper(center: Center) -> None:
            attach(center)
            self.tamper(center, session)

        session.attach = tamper  # type: ignore[method-assign]
        center = super().run(self.change(job, session), session, learner)
        self.afterwards(center, session)
        return center

    def change(self, job: Job, session: Session) -> Job:
        """Before the run."""
        return job

    def tamper(self, center: Center, session: Session) -> None:
        """At its beginning."""

    def afterwards(self, center: Center, session: Session) -> None:
        """At its end."""


def on_commits(change: Callable[[Commit, int], None]) -> Callable[[Defect, Center, Session], None]:
    """Change commits on their way to the center; the second argument is how many came before."""

    def tamper(self: Defect, center: Center, session: Session) -> None:
        receive, count = center.receive, 0

        def changed(commit: Commit) -> list[pg.Reply]:
            nonlocal count
            change(commit, count)
            count += 1
            return receive(commit)

        center.receive = changed  # type: ignore[method-assign]

    return tamper


class Rounds(Defect):
    """Every gradient counts the same, whatever the size of its mini-batch."""

    tamper = on_commits(lambda commit, count: setattr(commit, "weight", 1.0))


@dataclass(frozen=True)
class Dropping(pg.Downpour):
    """What was moved in flight is lost."""

    carries = True

    def adopt(self, me: pg.Replica, reply: pg.Reply) -> None:
        me.local = me.anchor = me.center = reply.value


class Careless(Defect):
    """Workers take answers as they are, whatever they did meanwhile."""

    def change(self, job: Job, session: Session) -> Job:
        return replace(job, scheme=Dropping(window=job.scheme.window, overlap=job.scheme.overlap))


class Skewed(Defect):
    """The center is not quite where it should be."""

    def afterwards(self, center: Center, session: Session) -> None:
        center.value.mul_(1.01)


class Forgetful(Defect):
    """An epoch is left out."""

    def change(self, job: Job, session: Session) -> Job:
        return replace(job, plan=replace(job.plan, epochs=job.plan.epochs - 1))


class Boastful(Defect):
    """Commits say that they hold more than they do."""

    tamper = on_commits(lambda commit, count: setattr(commit, "steps", commit.steps + (count == 3)))


class Jumpy(Defect):
    """The record of a commit is lost."""

    def tamper(self, center: Center, session: Session) -> None:
        applied, left_out = center.applied, [4]

        def tell(commit: Commit) -> None:
            if center.clock not in left_out:
                applied(commit)

        center.applied = tell


class Vague(Defect):
    """Commits claim to have begun from an older center than they did."""

    tamper = on_commits(lambda commit, count: setattr(commit, "version", max(0, commit.version - 1)))


def mend(commit: Commit) -> None:
    """In place: it may be the weights of its worker."""
    commit.value.nan_to_num_()


class Repairing(Defect):
    """NaN is made 0 on the way: what was wrong is hidden, and enters."""

    tamper = on_commits(lambda commit, count: mend(commit))


class Leaky(Defect):
    """A refused commit moves the center."""

    def tamper(self, center: Center, session: Session) -> None:
        refused = center.refused

        def leak(commit: Commit, why: str) -> None:
            center.value.add_(1e-3)
            refused(commit, why)

        center.refused = leak


class Bare(Defect):
    """A worker's exception comes without saying whose it is."""

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        try:
            return super().run(job, session, learner)
        except pg.WorkerError as error:
            raise RuntimeError("a worker failed") from error


class Silent(Defect):
    """A run in which a worker fails is over, and all is well."""

    def tamper(self, center: Center, session: Session) -> None:
        object.__setattr__(self, "center", center)

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        try:
            return super().run(job, session, learner)
        except pg.WorkerError:
            return self.center  # type: ignore[attr-defined,no-any-return]


class Amnesic(Defect):
    """A resumed run begins anew."""

    def run(self, job: Job, session: Session, learner: Learner) -> Center:
        session.resumed = None
        return super().run(job, session, learner)


class Untidy(Defect):
    """The run directory loses a file."""

    def afterwards(self, center: Center, session: Session) -> None:
        (session.directory / "run.toml").unlink()


class Deaf(Defect):
    """Callbacks are told of commits twice."""

    def tamper(self, center: Center, session: Session) -> None:
        tell = session._call_back

        def twice(event: pg.Event) -> None:
            tell(event)
            if event.kind == "commit":
                tell(event)

        session._call_back = twice  # type: ignore[method-assign]


DEFECTS = [
    (Skewed, "one_worker_is_plain_training", r"one worker ends .* away from the plain loop"),
    (Rounds, "a_round_is_the_large_batch", r"SyncSGD with 2 workers ends .* away"),
    (Careless, "a_window_in_flight_is_carried", r"one worker with overlap ends .* away"),
    (Forgetful, "every_row_is_used_once_per_epoch", "in the run 'alone', 12 of 36 mini-batches were never used"),
    (Boastful, "steps_and_rows_are_conserved", "has 2 steps, but 1"),
    (Jumpy, "the_clock_counts_updates", r"does not count one by one: \[1, 2, 3, 5"),
    (Vague, "staleness_counts_the_updates_of_others", "do not contain the version that their window began from"),
    (Repairing, "nan_never_enters", "no commit was rejected"),
    (Leaky, "nan_never_enters", "a rejected commit moved the center"),
    (Bare, "a_workers_exception_reaches_the_caller", "the caller got RuntimeError: a worker failed"),
    (Silent, "a_workers_exception_reaches_the_caller", "as if nothing had happened"),
    (Amnesic, "a_stopped_run_can_be_resumed", "resumes from"),
    (Skewed, "the_record_can_be_replayed", r"ends .* away from the run"),
    (Untidy, "the_run_directory_is_complete", r"run.toml is missing"),
    (Deaf, "callbacks_receive_what_is_recorded", "callbacks received"),
]


@pytest.mark.parametrize(("engine", "law", "told"), DEFECTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_defect_is_found_by_the_law_that_it_breaks(engine, law, told, tmp_path):
    trials = Trials(engine(), engine(workers=1), Path(tmp_path))
    with pytest.raises(AssertionError, match=told):
        getattr(engine_laws, law)(trials)


def test_every_law_has_a_defect_that_it_finds():
    assert {law for _, law, _ in DEFECTS} == {law.__name__ for law in LAWS}


def test_a_broken_engine_is_told_which_laws_it_breaks(monkeypatch):
    monkeypatch.setattr(engine_laws, "LAWS", LAWS[-2:])
    with pytest.raises(LawBroken, match=r"Untidy\(workers=2\) breaks 1 of 2 laws:\n- the run directory is complete: run.toml"):
        pg.check_engine(Untidy())


@pytest.mark.parametrize("given", ["locl", pg.Local, 3])
def test_what_is_no_engine_is_refused(given):
    with pytest.raises(pg.UsageError, match=r"Unknown engine|engine=Local is a class|engine=3 is not valid"):
        pg.check_engine(given)


def test_an_engine_that_cannot_be_had_alone_is_refused_with_the_reason():
    with pytest.raises(pg.UsageError, match=r"cannot have workers=1"):
        pg.check_engine(pg.Vector(workers=2, cluster=pg.Cluster(speeds=(1.0, 2.0))))
