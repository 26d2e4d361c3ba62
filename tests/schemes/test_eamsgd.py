"""EAMSGD: elastic averaging with the paper's Nesterov momentum, against its equations written out."""

from __future__ import annotations

from dataclasses import dataclass, field
from dataclasses import replace as changed

import pytest
import torch

import paragrad as pg
from paragrad.core.replica import Replica
from paragrad.engines.serial import Serial
from paragrad.laws.bowl import Bowl
from paragrad.types import Reply, Vector
from tests.schemes.golden import center_of, close, commit, serial, slope, vector

LR, ALPHA, MOMENTUM = 0.05, 0.3, 0.9


def eamsgd(**fields):
    return pg.EAMSGD(**{"window": 3, "alpha": ALPHA, "momentum": MOMENTUM} | fields)


def test_the_velocity_is_the_papers_on_three_numbers():
    scheme = pg.EAMSGD(window=2, alpha=0.5, momentum=0.5)
    me = Replica(vector(0.0, 0.0, 0.0), slots=scheme.worker_slots)
    me.begin_again(vector(1.0, 2.0, 3.0), 0)
    scheme.begin(me)
    me.local -= vector(0.4, 0.0, -0.2)  # v = -ηg, as there is no velocity yet
    assert scheme.go_on(me)
    assert close(me.slots["weights"], vector(0.6, 2.0, 3.2))
    assert close(me.local, vector(0.6 - 0.2, 2.0, 3.2 + 0.1)), "the next gradient is taken at w + δv"
    me.local -= vector(0.1, 0.1, 0.0)  # v = δv - ηg = (-0.2 - 0.1, -0.1, 0.1)
    assert scheme.go_on(me)
    assert close(me.slots["velocity"], vector(-0.3, -0.1, 0.1))
    assert close(scheme.commit(me), vector(0.3, 1.9, 3.3)), "the center is sent w, and not w + δv"
    scheme.adopt(me, Reply(worker=0, sequence=1, version=1, value=vector(0.1, 0.0, 0.0)))
    assert close(me.slots["weights"], vector(0.2, 1.9, 3.3))
    assert close(me.local, vector(0.2 - 0.15, 1.9 - 0.05, 3.3 + 0.05))


def test_the_center_moves_by_the_force_and_answers_with_it():
    center = center_of(pg.EAMSGD(window=1, alpha=0.5))
    replies = commit(center, 0, (3.0, 2.0, 1.0))
    assert replies[0].value.tolist() == [1.0, 0.0, -1.0]
    assert center.value.tolist() == [2.0, 2.0, 2.0]


# -- whole runs against the equations -------------------------------------------------------------------------------


@dataclass
class _Told(Serial):
    """A run that keeps what happened, and spoils the commits with these numbers."""

    spoilt: tuple[int, ...] = ()
    with_worker: bool = False
    events: list[tuple[str, int, tuple[int, ...], Vector]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        receive = self.center.receive

        def listening(message):
            value, count = message.value.clone(), len(self.applied)
            if len(self.events) in self.spoilt:
                message = changed(message, value=torch.full_like(value, float("nan")))
                if self.with_worker:
                    me = self.actors[message.worker].me
                    for mine in (me.local, *me.slots.values()):
                        mine.fill_(float("nan"))
            replies = receive(message)
            kind = "applied" if len(self.applied) > count else "refused"
            self.events.append((kind, message.worker, message.batches, value))
            return replies

        self.center.receive = listening  # type: ignore[method-assign]

    def crash(self, rank: int) -> None:
        super().crash(rank)
        self.events.append(("replaced", rank, (), torch.empty(0)))


def assert_is_the_paper(run):
    """Replay what happened with the equations as they are printed, in w and v."""
    center = Bowl().weights.clone()
    w = {rank: center.clone() for rank in range(run.workers)}
    v = {rank: torch.zeros_like(center) for rank in range(run.workers)}
    steps = 0
    for kind, k, batches, committed in run.events:
        for position in batches:
            v[k] = MOMENTUM * v[k] - LR * slope(run, position, w[k] + MOMENTUM * v[k])
            w[k] = w[k] + v[k]
            steps += 1
        if kind == "applied":
            assert close(committed, w[k])
            force = ALPHA * (w[k] - center)
            center, w[k] = center + force, w[k] - force
        else:
            w[k], v[k] = center.clone(), torch.zeros_like(center)
    assert close(run.center.value, center)
    return steps


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_is_the_equations_of_the_paper_with_a_short_last_window(workers):
    run = serial(eamsgd(), workers, rows=80 * workers, epochs=1, kind=_Told)
    run.run()
    assert assert_is_the_paper(run) == 20 * workers
    assert {done.steps for done in run.applied} == {3, 2}


@pytest.mark.parametrize("with_worker", [False, True], ids=["on the way", "in the worker"])
@pytest.mark.parametrize("spoilt", [(0,), (1, 2), (5,)], ids=["the first", "two", "in the middle"])
def test_after_a_refusal_a_worker_begins_at_the_center_at_rest(spoilt, with_worker):
    run = serial(eamsgd(), 2, rows=160, epochs=1, kind=_Told)
    run.spoilt, run.with_worker = spoilt, with_worker
    run.run()
    assert run.center.ledger.counts.refused == len(spoilt)
    assert_is_the_paper(run)


def test_a_replaced_worker_begins_at_the_center_at_rest():
    run = serial(eamsgd(), 2, rows=160, epochs=1, kind=_Told)
    run.run(commits=5)
    run.crash(1)
    run.run(commits=8)
    run.crash(0)
    run.run()
    assert_is_the_paper(run)


def test_without_momentum_it_is_aeasgd_to_the_bit():
    ends = [serial(scheme, 3).run().value for scheme in (eamsgd(momentum=0.0), pg.AEASGD(window=3, alpha=ALPHA))]
    assert torch.equal(*ends)


def test_momentum_makes_a_difference():
    assert not close(serial(eamsgd(), 2).run().value, serial(eamsgd(momentum=0.5), 2).run().value, within=1e-3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pg.EAMSGD(alpha=0.0), "alpha=0.0.*0 < alpha <= 1"),
        (lambda: pg.EAMSGD(alpha=1.1), "alpha=1.1"),
        (lambda: pg.EAMSGD(momentum=1.0), "momentum=1.0.*0 <= momentum < 1"),
        (lambda: pg.EAMSGD(momentum=-0.1), "momentum=-0.1"),
        (lambda: pg.EAMSGD(window=0), "window=0"),
    ],
)
def test_a_bad_value_is_refused_with_its_name(make, said):
    with pytest.raises(pg.UsageError, match=said):
        make()
