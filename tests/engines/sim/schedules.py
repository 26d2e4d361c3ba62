"""Random schedules of a small cluster, run through the real center and worker code, and an observer who checks the laws.

The observer knows nothing of how center and simulation keep their books: it writes down what the center is told, what it
answers and what reaches whom, and compares.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from hypothesis import assume
from hypothesis import strategies as st

import paragrad as pg
from paragrad.cluster import Churn, Fault, Uniform
from paragrad.core.center import PATIENCE, Center
from paragrad.core.job import Job
from paragrad.core.worker import Pulled
from paragrad.data.plan import Plan
from paragrad.data.source import Arrays
from paragrad.engines.sim.replicas import SeparateReplicas
from paragrad.engines.sim.simulation import Incarnation, Simulation
from paragrad.errors import Diverged, UsageError
from paragrad.laws.bowl import SIZE, Bowl
from paragrad.rundir.session import Session
from paragrad.schemes.scheme import overlap_obstacle
from paragrad.schemes.traits import is_shared, pull_every, pulls_before_commit
from paragrad.types import Commit, Event, Reply
from tests.laws.table import TABLE

BATCH = 2
MANY = 20_000
"""Events after which a run of these sizes is called endless."""


@dataclass(frozen=True)
class Unheld(pg.Downpour):
    """Movements are gathered, and nobody waits."""

    held = False

    def quorum(self, workers: int) -> int:
        return (workers + 1) // 2


@dataclass(frozen=True)
class InParts(pg.Downpour):
    """Fragments, each worker its own next one."""

    parts = 3


SCHEMES = [scheme for scheme, _ in TABLE if not is_shared(scheme)]
RISKY = [
    pg.BackupWorkers(),
    pg.BackupWorkers(backups=2),
    pg.SoftSync(),
    pg.SoftSync(splits=2, bound=1),
    pg.SoftSync(overlap=1),
    pg.SyncSGD(overlap=1),
    pg.AGN(window=2, overlap=1),
    pg.AGN(window=3, overlap=1, bound=1),
    pg.DiLoCo(window=2, overlap=1),
    pg.AsyncDiLoCo(window=4, outer_lr=0.5, dylu=True, overlap=1),
    Unheld(window=2),
    Unheld(window=1, bound=1),
    InParts(window=2),
]
"""What the books have most to do with: rounds that drop or do not hold, and windows that go on."""


@dataclass(frozen=True)
class Schedule:
    """All that a run depends on."""

    scheme: pg.Scheme
    workers: int
    batches: int
    epochs: int
    partition: str
    cluster: pg.Cluster
    poisoned: tuple[int, ...] = ()
    """The steps of each learner's life that come out as NaN."""
    seed: int = 0


@cache
def numbers_of_workers(scheme: pg.Scheme) -> list[int]:
    """How many workers a scheme can have, up to six."""
    fitting = []
    for workers in range(1, 7):
        try:
            scheme.quorum(workers)
        except UsageError:
            continue
        fitting.append(workers)
    return fitting


moments = st.integers(0, 40).map(lambda tick: tick / 2)
"""On a coarse grid, so that things happen at the same time, and at that of others."""
lengths = st.sampled_from((0.5, 1.0, 2.5, 6.0, 15.0))
speeds = st.sampled_from((1.0, 1.0, 0.5, 2.0, 3.7, pg.LogNormal(1.0, 0.5), pg.Exponential(1.0)))
latencies = st.sampled_from((0.0, 0.0, 0.3, 1.0, pg.Exponential(0.5), Uniform(0.0, 4.0), pg.LogNormal(1.0, 1.0)))
churns = st.builds(
    Churn, up=st.sampled_from((pg.Exponential(25.0), pg.Exponential(60.0))), down=st.sampled_from((0.0, 1.0, 4.0, 9.0))
)


def fault_of(workers: int) -> st.SearchStrategy[Fault]:
    """One fault, but for coming and going."""
    rank = st.integers(0, workers - 1)
    some = st.lists(rank, min_size=1, max_size=workers, unique=True).map(tuple)
    return st.one_of(
        st.builds(pg.Crash, worker=rank, at=moments, down=st.sampled_from((0.0, 0.5, 1.0, 3.0, 8.0, 20.0))),
        st.builds(pg.Crash, worker=rank, at=moments, down=st.sampled_from((0.0, 0.5, 1.0, 3.0, 8.0, 20.0))),
        st.builds(pg.DropMessage, worker=rank, at=moments, answer=st.booleans()),
        st.builds(pg.DropMessage, worker=rank, at=moments, answer=st.booleans()),
        st.builds(pg.DuplicateMessage, worker=rank, at=moments),
        st.builds(pg.DuplicateMessage, worker=rank, at=moments),
        st.builds(pg.Pause, worker=rank, at=moments, seconds=lengths),
        st.builds(pg.Slow, worker=rank, at=moments, factor=st.sampled_from((0.3, 3.0)), seconds=lengths),
        st.builds(pg.Partition, workers=some, at=moments, seconds=lengths),
        st.builds(pg.CenterCrash, at=moments, down=lengths),
    )


def moves_of(worker: int) -> st.SearchStrategy[list[Fault]]:
    """The comings and goings of a worker: one after the other, of either kind first."""

    def alternate(given: tuple[bool, list[float]]) -> list[Fault]:
        leaves, times = given
        kinds = [pg.Leave, pg.Join] if leaves else [pg.Join, pg.Leave]
        return [kinds[place % 2](worker=worker, at=at) for place, at in enumerate(sorted(times))]

    return st.tuples(st.booleans(), st.lists(moments, min_size=1, max_size=3, unique=True)).map(alternate)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any scheme on any small cluster, with whatever goes wrong."""
    scheme = draw(st.sampled_from(SCHEMES + 3 * RISKY))
    if overlap_obstacle(scheme) is None and draw(st.integers(0, 3)) == 0:
        scheme = replace(scheme, overlap=1)
    workers = draw(st.sampled_from(numbers_of_workers(scheme)))
    faults: list[Fault] = draw(st.lists(fault_of(workers), max_size=16))
    for worker in draw(st.lists(st.integers(0, workers - 1), max_size=2, unique=True)):
        faults += draw(moves_of(worker))
    cluster = pg.Cluster(
        speeds=draw(st.lists(speeds, min_size=1, max_size=workers).map(tuple)),
        latency=draw(st.lists(latencies, min_size=1, max_size=workers).map(tuple)),
        bandwidth=draw(st.sampled_from((None, None, 50.0))),
        center_rate=draw(st.sampled_from((None, None, 0.7, 4.0))),
        faults=tuple(faults),
        churn=draw(st.one_of(st.none(), st.none(), churns)),
        replace_after=draw(st.sampled_from((0.0, 2.0, 5.0))),
        retry=draw(st.sampled_from((0.5, 1.0, 3.0))),
    )
    try:
        cluster.check(workers)
    except UsageError:
        assume(False)
    return Schedule(
        scheme,
        workers,
        batches=draw(st.sampled_from((1, 2, 3, 5, 7, 9, 11, 13, 16))),
        epochs=draw(st.sampled_from((1, 2, 3))),
        partition=draw(st.sampled_from(("dealt", "stolen"))),
        cluster=cluster,
        poisoned=draw(st.sampled_from(((), (), (), (0,), (2,), (1, 4)))),
        seed=draw(st.integers(0, 3)),
    )


class Poisoned(Bowl):
    """A bowl some of whose steps are NaN."""

    steps: tuple[int, ...] = ()
    made = 0

    def _slope(self, batch):
        slope, step = super()._slope(batch)
        self.made += 1
        return (slope * math.nan if self.made - 1 in self.steps else slope), step


class Nowhere:
    """A record that is not kept."""

    error = None

    def __init__(self, path: Path) -> None:
        pass

    def write(self, event: Event) -> None:
        pass

    def flush(self) -> int:
        return 0

    def close(self) -> None:
        pass


@cache
def rows(count: int) -> Arrays:
    """Points around 0."""
    return Arrays(torch.randn(count, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


@cache
def plan_of(count: int, epochs: int, seed: int) -> Plan:
    """The last mini-batch of an epoch is a short one."""
    return Plan(count, BATCH, epochs, seed)


@dataclass
class Lived:
    """What the observer has seen of one incarnation."""

    steps: int = 0
    """In windows that ended."""
    sent: dict[int, Commit] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    """Of the centers that it was given: in answers, and pulled."""
    pulled: int | None = None
    acknowledged: set[int] = field(default_factory=set)


class Observer:
    """Watches a simulation; every law that can be looked at as it goes is."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.center: Center = simulation.center
        self.scheme = simulation.job.scheme
        self.counts: Counter[str] = Counter()
        self.lives: dict[tuple[int, int], Lived] = defaultdict(Lived)
        self.order: list[tuple[int, int, int, tuple[int, ...], int]] = []
        self.applied: dict[tuple[int, int], Commit] = {}
        self.turned: dict[tuple[int, int, int], str] = {}
        self.ledger = [0] * simulation.workers
        self.used: set[int] = set()
        self.in_a_row = Counter[int]()
        self.history = {0: self.center.value.clone()}
        self.updates = 0
        self.last_update = 0.0
        self.arrivals = 0
        self.arrived: dict[tuple[int, int, int], int] = {}
        self._watch()

    def _watch(self) -> None:
        center, simulation = self.center, self.simulation
        for name in ("receive", "join", "leave"):
            setattr(center, name, self._around(getattr(center, name)))
        for name in ("_answered", "_send", "_window_ended", "_next", "_drive", "_on_crash", "_transmit"):
            setattr(simulation, name, getattr(self, name)(getattr(simulation, name)))
        attach = simulation.session.attach

        def attached(center: Center) -> None:
            attach(center)
            note, refuse = center.applied, center.refused
            center.applied = lambda commit: (note(commit), self._applied(commit))
            center.refused = lambda commit, why: (refuse(commit, why), self._refused(commit, why))

        simulation.session.attach = attached
        write = simulation.center._states.flip

        def flip(commits: list[Commit]) -> None:
            write(commits)
            self.updates += 1
            self.last_update = self.simulation.now
            state = self.center._states.now
            assert state.clock == self.updates, "the clock is not the number of updates"
            assert bool(torch.isfinite(state.value).all()), "the center is not finite"
            self.history[self.updates] = state.value.clone()

        simulation.center._states.flip = flip

    # -- the center -----------------------------------------------------------------------------------------

    def _around(self, told: Callable[..., list[Reply]]) -> Callable[..., list[Reply]]:
        def tell(*arguments) -> list[Reply]:
            commit = arguments[0]
            self.arrivals += 1
            if isinstance(commit, Commit):
                self.arrived.setdefault((commit.worker, commit.sequence, commit.incarnation), self.arrivals)
                self._handed(commit)
            replies = told(*arguments)
            assert len({reply.worker for reply in replies}) == len(replies), "a worker is answered twice at once"
            for reply in replies:
                assert reply.version <= self.center.clock, "an answer is newer than the center"
                if self.scheme.answers == "center" or reply.sequence < 0 or not reply.applied:
                    assert torch.equal(reply.value, self.history[reply.version]), "an answer is not the center of its version"
            self._books()
            return replies

        return tell

    def _handed(self, commit: Commit) -> None:
        """What the center remembers to have given a worker is what that worker began from."""
        worker, key = commit.worker, (commit.worker, commit.sequence, commit.incarnation)
        current = commit.incarnation == self.simulation.lives[worker].incarnation and worker in self.center.live
        known = (worker, commit.sequence) in self.applied or key in self.turned
        if self.scheme.answers == "remembered" and current and not known:
            found = self.center.answers[worker]
            assert torch.equal(found, self.history[commit.version]), "the center remembers another answer than was given"

    def _books(self) -> None:
        center, leases = self.center, self.center.leases.state()
        assert [center.last(worker) for worker in range(center.workers)] == self.ledger, "the ledger is not what was applied"
        columns, batches = len(leases["cursors"]), leases["batches"]
        rounds = -(-batches // columns)
        places = Counter(self.used)
        for given in (*leases["held"], *leases["returned"]):
            places.update(given)
        for position in range(batches * leases["epochs"]):
            epoch, batch = divmod(position, batches)
            places[position] += epoch * rounds + batch // columns >= leases["cursors"][batch % columns]
        assert set(places.values()) == {1}, f"mini-batches that are not in exactly one place: {places}"
        assert len(places) == batches * leases["epochs"], "a mini-batch that there is not"
        assert leases["used"] == len(self.used)

    def _applied(self, commit: Commit) -> None:
        key = commit.worker, commit.sequence
        assert key not in self.applied, f"{key} was applied twice"
        assert commit.sequence > self.ledger[commit.worker], "a worker's commits were applied out of order"
        assert commit.staleness == self.center.clock - 1 - commit.version >= 0, "a staleness that cannot be"
        assert not self.used.intersection(commit.batches), "a mini-batch was used twice"
        assert (*key, commit.incarnation) not in self.turned, "a commit was turned away, and applied"
        assert commit.steps == len(commit.batches)
        assert commit.arrived == self.arrived[*key, commit.incarnation], "a commit that came again is noted as come later"
        self.applied[key] = commit
        self.ledger[commit.worker] = commit.sequence
        self.used.update(commit.batches)
        self.in_a_row[commit.worker] = 0
        self.order.append((*key, commit.incarnation, commit.batches, commit.staleness))

    def _refused(self, commit: Commit, why: str) -> None:
        key = commit.worker, commit.sequence, commit.incarnation
        assert key not in self.turned, f"{key} was turned away twice"
        assert key[:2] not in self.applied, "a commit was applied, and turned away"
        self.turned[key] = why
        self.counts[why] += 1
        self.in_a_row[commit.worker] += why == "not finite"

    # -- the workers ----------------------------------------------------------------------------------------

    def _answered(self, then: Callable[..., None]) -> Callable[..., None]:
        def answered(what: tuple[Incarnation, Reply]) -> None:
            life, reply = what
            simulation = self.simulation
            takes = life.alive and reply.sequence == life.waits_for and life is simulation.lives[life.rank]
            if takes and simulation._compute_times[life.rank].awake(simulation.now) <= simulation.now:
                lived = self.lives[life.rank, life.incarnation]
                if reply.sequence >= 0 and reply.applied:
                    lived.acknowledged.add(reply.sequence)
                fresh = reply.applied and reply.sequence >= 0 and lived.pulled is not None and pulls_before_commit(self.scheme)
                lived.versions.append(lived.pulled + 1 if fresh else reply.version)
                self.counts["answers"] += 1
            then(what)

        return answered

    def _drive(self, then: Callable[..., None]) -> Callable[..., None]:
        def drive(life: Incarnation, answer) -> None:
            if isinstance(answer, Pulled):
                assert torch.equal(answer.value, self.history[answer.clock]), "what was pulled is not the center of its clock"
                self.lives[life.rank, life.incarnation].pulled = answer.clock
            then(life, answer)

        return drive

    def _send(self, then: Callable[..., None]) -> Callable[..., None]:
        def send(life: Incarnation, commit: Commit) -> None:
            lived = self.lives[life.rank, life.incarnation]
            assert life.alive, "one that is gone has sent"
            assert commit.sequence not in lived.sent
            lived.sent[commit.sequence] = commit.copied()
            if pulls_before_commit(self.scheme) and self.simulation.messages.free:
                lived.pulled = commit.pulls[-1]
            given = lived.versions[-2:] if self.scheme.overlap else lived.versions[-1:]
            if pull_every(self.scheme) is None:
                assert commit.version in given, f"a window began from {commit.version}, but its worker was given {given}"
            assert commit.version in lived.versions
            self.counts["commits"] += 1
            then(life, commit)

        return send

    def _transmit(self, then: Callable[..., None]) -> Callable[..., None]:
        def transmit(life: Incarnation, *what) -> None:
            assert life.alive, "one that is gone has sent again"
            then(life, *what)

        return transmit

    def _window_ended(self, then: Callable[..., None]) -> Callable[..., None]:
        def ended(life: Incarnation) -> None:
            self.lives[life.rank, life.incarnation].steps += len(life.due.request.batches)
            then(life)

        return ended

    def _on_crash(self, then: Callable[..., None]) -> Callable[..., None]:
        def gone(rank: int, why: object) -> None:
            alive = self.simulation.lives[rank].alive
            then(rank, why)
            if alive and not self.simulation.lives[rank].alive:
                self.counts["leaves" if isinstance(why, pg.Leave) else "crashes"] += 1

        return gone

    def _next(self, then: Callable[[], None]) -> Callable[[], None]:
        def following() -> None:
            self.counts["events"] += 1
            assert self.counts["events"] < MANY, "the run does not end"
            before = self.simulation.now
            then()
            assert self.simulation.now >= before, "time went back"

        return following

    # -- the end --------------------------------------------------------------------------------------------

    def check_end(self, error: Exception | None) -> None:
        """What must be true when the run is over."""
        center, simulation = self.center, self.simulation
        if isinstance(error, Diverged):
            assert max(self.in_a_row.values()) >= PATIENCE, "called diverged without reason"
            self.counts["diverged"] += 1
            return
        if error is not None:
            assert "no worker left" in str(error), f"{type(error).__name__}: {error}"
            assert not any(life.alive for life in simulation.lives), "called deserted, but there are workers"
            self.counts["deserted"] += 1
        else:
            assert self.used == set(range(simulation.job.plan.positions)), "the run is over, but mini-batches were not used"
            rows = sum(commit.rows for commit in self.applied.values())
            assert rows == center.ledger.counts.rows == simulation.job.plan.rows * simulation.job.plan.epochs, (
                "rows are missing"
            )
            assert not any(center.leases.held(worker) for worker in range(center.workers))
            assert simulation.session.seconds == self.last_update, "the clock went on after the last commit"
        for (rank, incarnation), lived in self.lives.items():
            life = simulation.lives[rank]
            survived = life.alive and life.incarnation == incarnation
            for sequence in lived.acknowledged:
                mine = self.applied.get((rank, sequence))
                assert mine is not None, f"an acknowledged commit of worker {rank} is lost"
                assert mine.incarnation == incarnation, f"an acknowledged commit of worker {rank} is lost"
                assert mine.batches == lived.sent[sequence].batches
            missing = lived.steps - sum(commit.steps for commit in lived.sent.values())
            assert missing >= 0, "more steps were committed than made"
            for sequence, commit in lived.sent.items():
                known = self.applied.get((rank, sequence))
                if (known is None or known.incarnation != incarnation) and (rank, sequence, incarnation) not in self.turned:
                    missing += commit.steps
            # A commit that is turned away takes the window along that was computed while it was in flight.
            turned = sum((rank, sequence, incarnation) in self.turned for sequence in lived.sent)
            given_up = self.scheme.overlap * self.scheme.window * turned
            assert not survived or missing <= given_up, f"{missing} steps of worker {rank} are not accounted for"
            self.counts["steps lost with their worker"] += missing
        assert center.ledger.counts.commits == len(self.applied)
        assert center.ledger.counts.dropped + center.ledger.counts.refused == len(self.turned)
        assert center.ledger.counts.steps == len(self.used)


@dataclass
class Seen:
    """How a run ended."""

    order: list[tuple[int, int, int, tuple[int, ...], int]]
    center: torch.Tensor
    seconds: float
    said: str | None
    counts: Counter[str]


def run(schedule: Schedule, *, early: Callable[[], bool] | None = None) -> Seen:
    """A whole run under observation."""
    count = schedule.batches * BATCH - 1
    made = 0

    def make(device: str) -> Bowl:
        nonlocal made
        made += 1
        if not schedule.poisoned or made % 2:
            return Bowl()
        bowl = Poisoned()
        bowl.steps = schedule.poisoned
        return bowl

    job = Job(schedule.scheme, make, rows(count), None, plan_of(count, schedule.epochs, schedule.seed), count)
    settings = pg.Run(validate_every=None, checkpoint_every=None, partition=schedule.partition)
    with patch("paragrad.rundir.session.Record", Nowhere):
        session = Session(Path(), settings, job.plan, identity={})
    replicas = SeparateReplicas(job, schedule.workers, "cpu")
    simulation = Simulation(job, session, Bowl(), replicas, schedule.workers, schedule.cluster, early_moment=early)
    observer = Observer(simulation)
    waiting = _faults_waiting(simulation)
    error: Exception | None = None
    try:
        simulation.run()
    except (UsageError, Diverged) as raised:
        error = raised
    observer.check_end(error)
    struck = waiting - _faults_waiting(simulation)
    return Seen(
        observer.order,
        simulation.center.value.clone(),
        session.seconds,
        None if error is None else str(error),
        observer.counts + struck + Counter(schedules=1),
    )


def _faults_waiting(simulation: Simulation) -> Counter[str]:
    wire = simulation.messages
    return Counter(
        {
            "messages dropped": sum(map(len, wire._drops.values())),
            "messages twice": sum(map(len, wire._twice.values())),
        }
    )


def check(schedule: Schedule) -> Counter[str]:
    """Every law, on one schedule: run three times, once with windows computed as they begin."""
    first = run(schedule)
    for early in (None, lambda: True):
        again = run(schedule, early=early)
        assert again.order == first.order, "another order of commits"
        assert torch.equal(again.center, first.center), "another center"
        assert (again.seconds, again.said) == (first.seconds, first.said)
    return first.counts
