"""Error feedback telescopes: what was sent and counted, and what is left, is what was meant; whatever happens to whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paragrad as pg
from paragrad.codecs.feedback import Feedback
from paragrad.core import worker
from paragrad.core.job import Job
from paragrad.data.plan import Plan
from paragrad.engines.serial import Serial
from paragrad.errors import Diverged
from paragrad.laws.bowl import SIZE, Bowl
from paragrad.schemes.traits import is_additive, is_shared
from paragrad.types import Commit
from tests.codecs.table import TABLE
from tests.engines.sim import schedules as chaos
from tests.engines.sim.schedules import InParts, Poisoned, Schedule, Unheld, rows, schedules

randomly = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
codecs = st.sampled_from(TABLE)


@dataclass
class Meant:
    """What windows gave to the codec, by worker, incarnation and sequence; of an attempt of a run."""

    values: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note down every value that is coded inside."""
        given: list[torch.Tensor] = []
        encode, make = Feedback.encode, worker._commit

        def spy(me: Feedback, value: torch.Tensor, *where):
            given.append(value.clone())
            return encode(me, value, *where)

        def commit(*what, **named) -> Commit:
            made = make(*what, **named)
            self.values[made.worker, made.incarnation, made.sequence] = given.pop()
            return made

        with patch.object(Feedback, "encode", spy), patch.object(worker, "_commit", commit):
            yield


def spread(value: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """A fragment in its place."""
    whole = torch.zeros(SIZE, dtype=value.dtype)
    whole[SIZE * part // parts : SIZE * (part + 1) // parts] = value
    return whole


def check_telescopes(counted: list[tuple[Commit, torch.Tensor]], residuals: dict[int, torch.Tensor], parts: int = 1) -> None:
    """Of each worker: the decoded values that counted, and what is left, are the values that its windows came to."""
    gap: dict[int, torch.Tensor] = defaultdict(lambda: torch.zeros(SIZE, dtype=torch.float64))
    for commit, meant in counted:
        gap[commit.worker] += spread(meant - commit.value, commit.part, parts)
    assert set(residuals) == set(gap)
    for rank, left in gap.items():
        assert bool(torch.isfinite(residuals[rank]).all())
        assert torch.allclose(left, residuals[rank], rtol=0, atol=1e-9), f"the residual of worker {rank} is not what is left"


# -- by itself ------------------------------------------------------------------------------------------------------


@settings(randomly, max_examples=100)
@given(codec=codecs, answers=st.lists(st.booleans(), max_size=20), seed=st.integers(0, 5))
def test_a_commit_that_is_turned_away_leaves_the_residual_as_it_was(codec, answers, seed):
    generator = torch.Generator().manual_seed(seed)
    feedback = Feedback.like(codec, torch.zeros(SIZE, dtype=torch.float64))
    meant, sent = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    for applied in answers:
        value = torch.randn(SIZE, dtype=torch.float64, generator=generator)
        before, value_before = feedback.residual.clone(), value.clone()
        coded = feedback.encode(value, torch.empty_like(value))
        assert torch.equal(feedback.residual, before)
        assert torch.equal(value, value_before)
        assert coded.bytes <= codec.limit(SIZE)
        if applied:
            feedback.settle()
            assert feedback.residual is coded.residual
            meant, sent = meant + value, sent + coded.value
        assert torch.allclose(sent + feedback.residual, meant, rtol=0, atol=1e-9)


def test_what_is_not_finite_leaves_the_residual_as_it_was():
    feedback = Feedback.like(pg.TopK(0.3), torch.zeros(SIZE))
    feedback.encode(torch.arange(float(SIZE)), torch.empty(SIZE))
    feedback.settle()
    before = feedback.residual.clone()
    coded = feedback.encode(torch.full((SIZE,), torch.nan), torch.empty(SIZE))
    assert not bool(torch.isfinite(coded.value).all())
    assert torch.equal(feedback.residual, before)


# -- in the serial engine, across checkpoints -----------------------------------------------------------------------


@dataclass(frozen=True)
class Patient(pg.Downpour):
    """As many movements are gathered as there are workers, whosever they are, and nobody waits."""

    held = False

    def quorum(self, workers: int) -> int:
        return workers


SCHEMES = [
    Patient(),
    pg.AGN(window=2),
    pg.AGN(window=2, overlap=1),
    pg.SyncSGD(overlap=1),
    pg.Downpour(window=1),
    pg.SyncSGD(),
    pg.BackupWorkers(),
    pg.SoftSync(splits=2),
    pg.EASGD(window=2),
    pg.DiLoCo(window=2),
    pg.AsyncDiLoCo(window=2),
    pg.DCASGD(),
    pg.GEM(window=2),
    Unheld(window=2),
    InParts(window=2),
]


def job_of(scheme: pg.Scheme, codec: pg.Codec | None, poisoned: tuple[int, ...] = ()) -> Job:
    """A bowl of which every second worker has steps that are NaN."""
    made = 0

    def make(device: str) -> Bowl:
        nonlocal made
        made += 1
        if not poisoned or made % 2:
            return Bowl()
        bowl = Poisoned()
        bowl.steps = poisoned
        return bowl

    count = 23
    return Job(scheme, make, rows(count), None, Plan(count, 2, 3, seed=1), count, codec=codec)


def watched(
    scheme: pg.Scheme, codec: pg.Codec, poisoned: tuple[int, ...], counted: list[tuple[Commit, torch.Tensor]]
) -> tuple[Serial, Meant]:
    """Three workers, whose commits are noted down beside what they were meant to be."""
    serial, meant = Serial(job_of(scheme, codec, poisoned), 3, stolen=scheme.quorum(3) == 1), Meant()
    serial.center.applied = lambda commit: counted.append(
        (commit.copied(), meant.values[commit.worker, commit.incarnation, commit.sequence])
    )
    return serial, meant


@settings(randomly, max_examples=100)
@given(
    scheme=st.sampled_from(SCHEMES),
    codec=codecs,
    poisoned=st.sampled_from([(), (), (1,), (0, 3)]),
    happens=st.lists(st.tuples(st.sampled_from(["step"] * 12 + ["crash", "resume"]), st.integers(0, 2)), max_size=60),
)
def test_it_telescopes_across_crashes_refusals_drops_and_checkpoints(scheme, codec, poisoned, happens):
    counted: list[tuple[Commit, torch.Tensor]] = []

    def begin() -> tuple[Serial, Meant]:
        return watched(scheme, codec, poisoned, counted)

    serial, meant = begin()
    try:
        with meant.watching():
            serial.start()
        for what, rank in happens:
            with meant.watching():
                if what == "crash":
                    serial.crash(rank)
                elif what == "resume":
                    kept = serial.center.snapshot()
                    serial, meant = begin()
                    serial.center.restore(kept)
                    serial.start()
                elif serial.ready:
                    serial.step(serial.ready[rank % len(serial.ready)])
            check_telescopes(counted, serial.center.private.residuals, scheme.parts)
        with meant.watching():
            serial.run()
    except Diverged:
        pass
    check_telescopes(counted, serial.center.private.residuals, scheme.parts)


def test_commits_that_wait_in_a_round_while_their_worker_goes_on_keep_what_they_left():
    counted: list[tuple[Commit, torch.Tensor]] = []
    serial, meant = watched(Patient(), pg.TopK(0.3), (), counted)
    with meant.watching():
        serial.start()
        for rank in (1, 2, 0):
            serial.step(rank)
        assert serial.center.clock == 1
        serial.step(0)
        serial.step(0)
        assert len(serial.center.round.commits) == 2
        check_telescopes(counted, serial.center.private.residuals)
        serial.crash(0)  # the newcomer goes on from what the commits that wait have left
        serial.step(0)
        assert serial.center.clock == 2
    check_telescopes(counted, serial.center.private.residuals)


def test_there_were_refusals_and_drops_in_it():
    serial = Serial(job_of(pg.BackupWorkers(), pg.TopK(0.3), (1,)), 3, choose=lambda ready: ready[-1], stolen=True)
    counts = serial.run().ledger.counts
    assert counts.dropped > 0
    assert counts.refused > 0


# -- on a virtual cluster -------------------------------------------------------------------------------------------


@settings(randomly, max_examples=100)
@given(schedule=schedules(), codec=codecs)
def test_it_telescopes_on_any_cluster(schedule: Schedule, codec):
    scheme = schedule.scheme
    if not is_additive(scheme) or scheme.sends or is_shared(scheme):
        scheme = pg.AGN(window=2)
    meant, seen = Meant(), []

    class Watched(chaos.Observer):
        def check_end(self, error: Exception | None) -> None:
            super().check_end(error)
            seen.append(self)

    with (
        meant.watching(),
        patch.object(chaos, "Observer", Watched),
        patch.object(chaos, "Job", lambda *what: Job(*what, codec=codec)),
    ):
        chaos.run(replace(schedule, scheme=scheme))
    applied = seen[0].applied.values()
    counted = [(commit, meant.values[commit.worker, commit.incarnation, commit.sequence]) for commit in applied]
    check_telescopes(counted, seen[0].center.private.residuals, scheme.parts)


# -- without a codec ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_a_codec_that_loses_nothing_changes_nothing(scheme):
    """All elements are sent, as values that float32 holds: the residual is 0, and the run is the plain one."""

    def run(codec: pg.Codec | None) -> Serial:
        job = job_of(scheme, codec)
        serial = Serial(replace(job, make_learner=lambda device: Bowl(weights=torch.linspace(-1, 2, SIZE))), 3)
        serial.run()
        return serial

    plain, coded = run(None), run(pg.TopK(1.0))
    assert plain.center.private.residuals == {}
    assert torch.equal(plain.center.value, coded.center.value)
    assert Counter((c.worker, c.sequence) for c in plain.applied) == Counter((c.worker, c.sequence) for c in coded.applied)
    assert all(not bool(residual.any()) for residual in coded.center.private.residuals.values())
